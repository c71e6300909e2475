//! `forebay serve`: what is refused, and what clients are told.

mod common;
#[path = "common/server.rs"]
mod server;

use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use server::{Response, Server, question};

const CHAT: &str = "/v1/chat/completions";

#[test]
fn what_is_wrong_is_said_with_its_field() {
    let server = Server::start(&["--parallel", "2", "--queue", "2"]);
    let hello = question("Hello");
    let long = question(&"word ".repeat(5000));
    let chat = |more: Value| {
        let mut body = json!({ "messages": hello });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let image =
        json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "data:," } }] }]);
    let tool = json!([{ "type": "function", "function": { "name": "f", "parameters": {} } }]);
    let cases: Vec<(Value, &str, &str)> = vec![
        (json!({}), "messages", "no messages"),
        (json!({ "messages": [] }), "messages", "no messages"),
        (json!({ "messages": "Hello" }), "messages", "makes no sense"),
        (json!({ "messages": [{ "content": "Hello" }] }), "messages", "role"),
        (json!({ "messages": image }), "messages[0].content", "image"),
        (json!({ "messages": long }), "messages", "maximum context length is 1024 tokens"),
        (chat(json!({ "temperature": -1 })), "temperature", "at least 0"),
        (chat(json!({ "temperature": "hot" })), "temperature", "makes no sense"),
        (chat(json!({ "top_p": 2 })), "top_p", "between 0 and 1"),
        (chat(json!({ "presence_penalty": 3 })), "presence_penalty", "between -2 and 2"),
        (chat(json!({ "max_tokens": 0 })), "max_tokens", "at least 1"),
        (chat(json!({ "max_completion_tokens": -7 })), "max_completion_tokens", "at least 1"),
        (chat(json!({ "n": 0 })), "n", "between 1 and 128"),
        (chat(json!({ "n": 5 })), "n", "takes 4"),
        (chat(json!({ "stop": "" })), "stop", "empty"),
        (chat(json!({ "stop": vec!["a"; 17] })), "stop", "16"),
        (chat(json!({ "logit_bias": { "99999999": 1 } })), "logit_bias", "not a token"),
        (chat(json!({ "logit_bias": { "word": 1 } })), "logit_bias", "not a token"),
        (chat(json!({ "top_logprobs": 2 })), "top_logprobs", "needs logprobs"),
        (chat(json!({ "logprobs": true, "top_logprobs": 21 })), "top_logprobs", "20"),
        (chat(json!({ "logprobs": 3 })), "logprobs", "true or false"),
        (chat(json!({ "response_format": { "type": "xml" } })), "response_format.type", "json_schema"),
        (
            chat(json!({ "response_format": { "type": "json_schema" } })),
            "response_format.json_schema",
            "no schema",
        ),
        (chat(json!({ "tools": [{ "type": "web_search" }] })), "tools[0].type", "functions"),
        (chat(json!({ "tools": [{ "type": "function" }] })), "tools[0].function.name", "no name"),
        (chat(json!({ "tool_choice": "required" })), "tool_choice", "no tools"),
        (chat(json!({ "tool_choice": "maybe", "tools": tool })), "tool_choice", "\"auto\""),
        (
            chat(
                json!({ "tool_choice": { "type": "function", "function": { "name": "g" } }, "tools": tool }),
            ),
            "tool_choice",
            "no tool \"g\"",
        ),
        (chat(json!({ "functions": [] })), "functions", "use tools"),
        (chat(json!({ "modalities": ["text", "audio"] })), "modalities", "only text"),
        (chat(json!({ "audio": {} })), "audio", "not supported"),
        (chat(json!({ "grammar": "root ::= \"x\"" })), "grammar", "response_format"),
        (chat(json!({ "guided_choice": ["a", "b"] })), "guided_choice", "response_format"),
        (chat(json!({ "mirostat": 2 })), "mirostat", "no such sampler"),
        (chat(json!({ "min_tokens": 5 })), "min_tokens", "ignore_eos"),
        (chat(json!({ "chat_template": "{{ x }}" })), "chat_template", "--chat-template-file"),
        (chat(json!({ "reasoning_format": "none" })), "reasoning_format", "told apart"),
        (chat(json!({ "enable_thinking": false })), "enable_thinking", "chat_template_kwargs"),
        (chat(json!({ "moderation": { "model": "m" } })), "moderation", "not supported"),
        (chat(json!({ "echo": true })), "echo", "next message alone"),
        (
            chat(json!({ "json_schema": {}, "response_format": { "type": "json_object" } })),
            "json_schema",
            "one of them",
        ),
        (chat(json!({ "json_schema": { "type": "colour" } })), "json_schema", "colour"),
        (chat(json!({ "n": 1.5 })), "n", "makes no sense"),
    ];
    for (body, param, said) in cases {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = stream.into();
            refused(&server.post(CHAT, &body), 400, &json!(param), said, &body);
        }
    }
    let overflow = server.post(CHAT, &json!({ "messages": long })).json();
    assert_eq!(overflow["error"]["code"], "context_length_exceeded");
    for (body, param, said) in [
        (json!({}), "prompt", "no prompt"),
        (json!({ "prompt": [] }), "prompt", "nothing to continue"),
        (json!({ "prompt": [[1], []] }), "prompt", "nothing to continue"),
        (json!({ "prompt": [99999999] }), "prompt", "not a token"),
        (json!({ "prompt": { "a": 1 } }), "prompt", "makes no sense"),
        (json!({ "prompt": "a", "suffix": "b" }), "suffix", "not supported"),
        (json!({ "prompt": "a", "best_of": 3 }), "best_of", "not supported"),
        (json!({ "prompt": "a", "echo": true, "logprobs": 1 }), "echo", "leave out logprobs"),
        (json!({ "prompt": "a", "logprobs": 21 }), "logprobs", "20"),
        (json!({ "prompt": "word ".repeat(5000) }), "prompt", "1024"),
        (json!({ "prompt": "a", "messages": hello }), "messages", "send prompt"),
        (json!({ "prompt": "a", "tools": tool }), "tools", "calls none"),
        (json!({ "prompt": "a", "n_predict": 0 }), "n_predict", "at least 1"),
    ] {
        refused(&server.post("/v1/completions", &body), 400, &json!(param), said, &body);
    }
    // Fields that nobody knows are nobody's business, nor are those that say what is the case anyway.
    let fine = chat(json!({
        "max_tokens": 1, "user": "me", "store": false, "metadata": {}, "service_tier": "auto", "unheard_of": 7,
        "response_format": { "type": "text" }, "n": 1, "best_of": 1, "functions": null, "modalities": ["text"],
        "parallel_tool_calls": true, "tool_choice": "none", "stop": null, "logprobs": false, "top_logprobs": 0,
        "grammar": "", "samplers": [], "typical_p": 1, "mirostat": 0, "dry_multiplier": 0.0, "ignore_eos": false,
        "min_tokens": 0, "skip_special_tokens": true, "reasoning_format": "auto", "chat_template": null,
        "cache_prompt": true, "timings_per_token": true, "id_slot": -1, "lora": [], "echo": false,
    }));
    server.post(CHAT, &fine).ok();
    // None of this left anything behind.
    assert_eq!(server.metric("forebay_requests_open"), 0.0);
}

/// What the description promises holds: null is absent wherever a field is optional, and the least and the most are.
#[test]
fn the_description_tells_the_truth() {
    let server = Server::start(&["--parallel", "4", "--queue", "256"]);
    let description = server.get("/openapi.json").ok();
    let hello = question("Hello");
    for (path, body) in [
        (CHAT, json!({ "messages": hello, "max_completion_tokens": 1, "logprobs": true })),
        ("/v1/completions", json!({ "prompt": "a", "max_completion_tokens": 1 })),
        ("/v1/responses", json!({ "input": "a", "max_output_tokens": 1 })),
        ("/v1/messages", json!({ "messages": hello, "max_tokens": 1 })),
        ("/v1/messages/count_tokens", json!({ "messages": hello })),
        ("/tokenize", json!({ "content": "a" })),
        ("/apply-template", json!({ "messages": hello })),
    ] {
        let request = &description["paths"][path]["post"]["requestBody"]["content"]["application/json"];
        let schema = &request["schema"];
        let with = |name: &str, value: Value| {
            let mut body = body.clone();
            body[name] = value;
            server.post(path, &body)
        };
        for (name, field) in schema["properties"].as_object().unwrap() {
            let required = schema["required"].as_array().unwrap().iter().any(|known| known == name);
            let nullable = field.to_string().contains("\"null\"");
            assert_eq!(nullable, !required, "{path} {name}: {field}");
            if nullable && body.get(name).is_none() {
                assert_eq!(with(name, Value::Null).status, 200, "{path} {name}: null");
            }
            // Counting tokens looks at nothing but the conversation.
            if path.ends_with("count_tokens") {
                continue;
            }
            for (bound, beyond) in [("minimum", -1), ("maximum", 1)] {
                let Some(limit) = field[bound].as_i64() else { continue };
                assert_eq!(with(name, json!(limit)).status, 200, "{path} {name}: {limit}");
                // An integer may be written with a decimal point.
                assert_eq!(with(name, json!(limit as f64)).status, 200, "{path} {name}: {limit}.0");
                let refused = with(name, json!(limit + beyond));
                assert_eq!(refused.status, 400, "{path} {name}: {}", limit + beyond);
                assert!(refused.text().contains(name.as_str()), "{path} {name}: {}", refused.text());
            }
        }
    }
    let tokens = server.post("/tokenize", &json!({ "content": "a cat" })).ok()["tokens"].clone();
    let decimal: Vec<f64> = tokens.as_array().unwrap().iter().map(|token| token.as_f64().unwrap()).collect();
    assert_eq!(server.post("/detokenize", &json!({ "tokens": decimal })).ok()["content"], "a cat");
    server.post("/v1/completions", &json!({ "prompt": decimal, "max_tokens": 1.0, "logprobs": 2.0 })).ok();
}

#[track_caller]
fn refused(response: &Response, status: u16, param: &Value, said: &str, asked: &Value) {
    let error = &response.json()["error"];
    assert_eq!((response.status, &error["param"]), (status, param), "{asked}: {error}");
    assert!(error["message"].as_str().unwrap().contains(said), "{asked}: {error}");
    assert_eq!(error["type"], "invalid_request_error", "{asked}");
    assert_eq!(response.header("x-should-retry"), Some("false"), "{asked}");
}

#[test]
fn requests_that_are_none_are_refused() {
    let server = Server::start(&["--max-body", "64K"]);
    let cases: [(&str, &str, Vec<u8>, u16, &str); 9] = [
        ("POST", CHAT, b"{\"messages\": [".to_vec(), 400, "not JSON"),
        ("POST", CHAT, b"".to_vec(), 400, "not JSON"),
        ("POST", CHAT, b"[1, 2]".to_vec(), 400, "not an object"),
        ("POST", CHAT, b"{\"messages\": \"\xff\xfe\"}".to_vec(), 400, "not UTF-8"),
        ("POST", CHAT, "[".repeat(5000).into_bytes(), 400, "not JSON"),
        ("POST", CHAT, vec![b' '; 70_000], 413, "64.0 KiB"),
        ("GET", CHAT, b"".to_vec(), 405, "GET"),
        ("POST", "/v1/embeddings", b"{}".to_vec(), 404, "nothing at /v1/embeddings"),
        ("GET", "/../etc/passwd", b"".to_vec(), 404, "nothing at"),
    ];
    for (method, path, body, status, said) in cases {
        let response = server.call(method, path, &[], &body);
        let error = &response.json()["error"];
        assert_eq!(response.status, status, "{method} {path}: {error}");
        assert!(error["message"].as_str().unwrap().contains(said), "{method} {path}: {error}");
        assert_eq!(response.header("x-should-retry"), Some("false"));
    }
    // A body of which nobody says how long it is.
    let mut stream = server.connect();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    for _ in 0..20 {
        if stream.write_all(format!("2000\r\n{}\r\n", " ".repeat(0x2000)).as_bytes()).is_err() {
            break;
        }
    }
    assert_eq!(Response::read(stream).status, 413);
    // What is not HTTP.
    let mut stream = server.connect();
    stream.write_all(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n").unwrap();
    assert_eq!(Response::read(stream).status, 400);
    server.post(CHAT, &json!({ "messages": question("Hello"), "max_tokens": 1 })).ok();
}

#[test]
fn slow_clients_keep_nobody_waiting() {
    let server = Server::start(&[]);
    let idle: Vec<_> = (0..50).map(|_| server.connect()).collect();
    let halves: Vec<_> = (0..50)
        .map(|i| {
            let mut stream = server.connect();
            let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n");
            let body = format!("{head}content-length: 500\r\n\r\n{{\"messages\": ");
            stream.write_all(if i % 2 == 0 { head.as_bytes() } else { body.as_bytes() }).unwrap();
            stream
        })
        .collect();
    // Somebody who never reads what was asked for.
    let ask = json!({ "messages": question("Tell me a story."), "max_tokens": 200, "stream": true });
    let deaf: Vec<_> = (0..4).map(|_| server.send("POST", CHAT, &[], ask.to_string().as_bytes())).collect();
    let start = Instant::now();
    server.post(CHAT, &json!({ "messages": question("Hello"), "max_tokens": 5 })).ok();
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    server.wait_for_metric("forebay_requests_open", 0.0, Duration::from_secs(60));
    drop((idle, halves, deaf));
}

#[test]
fn keys_open_all_but_health() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, "from-a-file\n").unwrap();
    let server = Server::start(&["--api-key", "open sesame", "--api-key-file", &common::text(&file)]);
    let status = |path: &str, headers: &[(&str, &str)]| {
        let (method, body): (_, &[u8]) = if path == CHAT { ("POST", b"{}") } else { ("GET", b"") };
        server.call(method, path, headers, body).status
    };
    // The empty header keeps the client from sending the right one.
    let none = [("x-api-key", "")];
    assert_eq!(status("/health", &none), 200);
    for path in ["/v1/models", "/models", "/ready", "/metrics", "/props", "/openapi.json", CHAT, "/nowhere"] {
        assert_eq!(status(path, &none), 401, "{path}");
        assert_eq!(status(path, &[("authorization", "Bearer wrong")]), 401, "{path}");
        assert_ne!(status(path, &[("authorization", "Bearer from-a-file")]), 401, "{path}");
        assert_ne!(status(path, &[("x-api-key", "open sesame")]), 401, "{path}");
    }
    let refused = server.call("GET", "/v1/models", &none, b"");
    assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
    assert!(!refused.text().contains("sesame"));
    assert!(!server.log().contains("sesame"));
}

#[test]
fn pages_of_other_sites_are_refused_unless_they_are_listed() {
    let server = Server::start(&["--cors-origin", "https://good.example"]);
    let ask = |method: &str, origin: &str, more: &[(&str, &str)]| {
        server.call(method, "/v1/models", &[&[("origin", origin)], more].concat(), b"")
    };
    let good = ask("GET", "https://good.example", &[]);
    assert_eq!(
        (good.status, good.header("access-control-allow-origin")),
        (200, Some("https://good.example"))
    );
    let bad = ask("GET", "https://bad.example", &[]);
    assert_eq!((bad.status, bad.header("access-control-allow-origin")), (403, None));
    let own = ask("GET", &format!("http://{}", server.address), &[]);
    assert_eq!((own.status, own.header("access-control-allow-origin")), (200, None));
    let wanted =
        [("access-control-request-method", "POST"), ("access-control-request-headers", "authorization")];
    let before = ask("OPTIONS", "https://good.example", &wanted);
    assert_eq!((before.status, before.header("access-control-allow-headers")), (204, Some("authorization")));
    assert_eq!(ask("OPTIONS", "https://bad.example", &wanted).status, 403);
}

#[test]
fn a_site_whose_name_leads_here_is_not_answered() {
    let server = Server::start(&["--cors-origin", "http://listed.example"]);
    let ask = |head: &str| {
        let mut stream = server.connect();
        stream.write_all(format!("{head}connection: close\r\n\r\n").as_bytes()).unwrap();
        Response::read(stream)
    };
    let evil = "host: evil.example\r\norigin: http://evil.example\r\n";
    for path in ["/v1/models", "/", "/health", "/live"] {
        let refused = ask(&format!("GET {path} HTTP/1.1\r\n{evil}"));
        assert_eq!(refused.status, 403, "{path}: {}", refused.text());
        assert_eq!(refused.header("access-control-allow-origin"), None);
        assert!(refused.text().contains("--cors-origin") && refused.text().contains("--api-key-file"));
    }
    // The name in the first line counts as well.
    assert_eq!(ask("GET http://evil.example/health HTTP/1.1\r\nhost: localhost\r\n").status, 403);
    for head in ["GET /health HTTP/1.1\r\nhost: listed.example\r\n", "GET /health HTTP/1.0\r\n"] {
        assert_eq!(ask(head).status, 200, "{head}");
    }
    let with_key = Server::start(&["--api-key", "open sesame"]);
    assert_eq!(with_key.call("GET", "/health", &[("host", "evil.example")], b"").status, 200);
}

#[test]
fn a_model_without_a_template_continues_texts_alone() {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(common::golden("qwen35moe")).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "chat_template.jinja" {
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
    }
    let path = common::text(folder.path());
    let server = Server::start(&[&path]);
    for address in [CHAT, "/apply-template", "/tokenize"] {
        let refused = server.post(address, &json!({ "messages": question("Hello") }));
        assert_eq!(
            (refused.status, &refused.json()["error"]["param"]),
            (400, &json!("messages")),
            "{address}"
        );
        assert!(
            refused.text().contains("no chat template") && !refused.text().contains(&path),
            "{}",
            refused.text()
        );
    }
    server.post("/v1/completions", &json!({ "prompt": "Hello", "max_tokens": 2 })).ok();
}
