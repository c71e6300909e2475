//! `forebay serve`: what is refused, and what clients are told.

use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common;
use crate::common::server::{Response, Server, question};

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
        (json!({ "messages": "Hello" }), "messages", "is invalid"),
        (json!({ "messages": [{ "content": "Hello" }] }), "messages", "role"),
        (json!({ "messages": image }), "messages[0].content", "image"),
        (json!({ "messages": long }), "messages", "maximum context length is 1024 tokens"),
        (chat(json!({ "temperature": -1 })), "temperature", "at least 0"),
        (chat(json!({ "temperature": "hot" })), "temperature", "is invalid"),
        (chat(json!({ "top_p": 2 })), "top_p", "between 0 and 1"),
        (chat(json!({ "presence_penalty": 3 })), "presence_penalty", "between -2 and 2"),
        (chat(json!({ "max_tokens": 0 })), "max_tokens", "at least 1"),
        (chat(json!({ "max_completion_tokens": -7 })), "max_completion_tokens", "at least 1"),
        (chat(json!({ "n": 0 })), "n", "between 1 and 128"),
        (chat(json!({ "n": 5 })), "n", "at most 3"),
        (chat(json!({ "stop": "" })), "stop", "empty"),
        (chat(json!({ "stop": vec!["a"; 17] })), "stop", "16"),
        (chat(json!({ "logit_bias": { "99999999": 1 } })), "logit_bias", "not a token"),
        (chat(json!({ "logit_bias": { "word": 1 } })), "logit_bias", "not a token"),
        (chat(json!({ "top_logprobs": 2 })), "top_logprobs", "requires logprobs"),
        (chat(json!({ "logprobs": true, "top_logprobs": 21 })), "top_logprobs", "20"),
        (chat(json!({ "logprobs": 3 })), "logprobs", "true or false"),
        (chat(json!({ "response_format": { "type": "xml" } })), "response_format.type", "json_schema"),
        (
            chat(json!({ "response_format": { "type": "json_schema" } })),
            "response_format.json_schema",
            "schema is missing",
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
        (chat(json!({ "mirostat": 2 })), "mirostat", "sampler does not exist"),
        (chat(json!({ "min_tokens": 5 })), "min_tokens", "ignore_eos"),
        (chat(json!({ "chat_template": "{{ x }}" })), "chat_template", "--chat-template-file"),
        (chat(json!({ "reasoning_format": "none" })), "reasoning_format", "separate"),
        (chat(json!({ "enable_thinking": false })), "enable_thinking", "chat_template_kwargs"),
        (chat(json!({ "moderation": { "model": "m" } })), "moderation", "not supported"),
        (chat(json!({ "echo": true })), "echo", "only the next message"),
        (
            chat(json!({ "json_schema": {}, "response_format": { "type": "json_object" } })),
            "json_schema",
            "one of them",
        ),
        (chat(json!({ "json_schema": { "type": "colour" } })), "json_schema", "colour"),
        (chat(json!({ "n": 1.5 })), "n", "is invalid"),
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
        (json!({}), "prompt", "prompt is missing"),
        (json!({ "prompt": [] }), "prompt", "prompt is empty"),
        (json!({ "prompt": [[1], []] }), "prompt", "prompt is empty"),
        (json!({ "prompt": [99999999] }), "prompt", "not a token"),
        (json!({ "prompt": { "a": 1 } }), "prompt", "is invalid"),
        (json!({ "prompt": "a", "suffix": "b" }), "suffix", "not supported"),
        (json!({ "prompt": "a", "best_of": 3 }), "best_of", "not supported"),
        (json!({ "prompt": "a", "echo": true, "logprobs": 1 }), "echo", "or logprobs"),
        (json!({ "prompt": "a", "logprobs": 21 }), "logprobs", "20"),
        (json!({ "prompt": "word ".repeat(5000) }), "prompt", "1024"),
        (json!({ "prompt": "a", "messages": hello }), "messages", "send prompt"),
        (json!({ "prompt": "a", "tools": tool }), "tools", "no tool calls"),
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
        ("POST", CHAT, b"[1, 2]".to_vec(), 400, "not a JSON object"),
        ("POST", CHAT, b"{\"messages\": \"\xff\xfe\"}".to_vec(), 400, "not UTF-8"),
        ("POST", CHAT, "[".repeat(5000).into_bytes(), 400, "not JSON"),
        ("POST", CHAT, vec![b' '; 70_000], 413, "64.0 KiB"),
        ("GET", CHAT, b"".to_vec(), 405, "GET"),
        ("POST", "/v1/embeddings", b"{}".to_vec(), 404, "/v1/embeddings does not exist"),
        ("GET", "/../etc/passwd", b"".to_vec(), 404, "does not exist"),
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

/// A list of zeros, which takes little to write and much to hold.
#[cfg(target_os = "linux")]
fn zeros(count: usize) -> String {
    format!("[{}]", vec!["0"; count].join(","))
}

#[cfg(target_os = "linux")]
#[test]
fn what_a_request_makes_the_server_hold_is_within_its_memory() {
    let budget = 256 << 20;
    let start = || Server::start(&["--device", "cpu", "--threads", "1", "--memory", "256M"]);
    let chat = |more: &str| {
        format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"Hi\"}}], \"max_tokens\": 2, {more}}}")
    };
    let tool = |zeros: &str| {
        format!(
            "{{\"type\": \"function\", \"function\": {{\"name\": \"f\", \"parameters\": {{\"enum\": {zeros}}}}}}}"
        )
    };
    let long = "a".repeat(16_000_000);
    let cases: Vec<(&str, String, u16)> = vec![
        (CHAT, chat(&format!("\"n\": 72, \"tools\": [{}]", tool(&zeros(100_000)))), 200),
        (CHAT, chat(&format!("\"chat_template_kwargs\": {{\"a\": {}}}", zeros(1_000_000))), 413),
        (CHAT, chat(&format!("\"unknown\": {}", zeros(4_000_000))), 413),
        (CHAT, chat(&format!("\"n\": 72, \"stop\": [\"{}\"]", "x".repeat(1_000_000))), 413),
        ("/v1/completions", json!({ "prompt": long }).to_string(), 413),
        ("/v1/completions", json!({ "prompt": &long[..2_000_000] }).to_string(), 400),
        (CHAT, json!({ "messages": question(&long[..2_000_000]) }).to_string(), 400),
        (
            "/v1/messages",
            json!({ "messages": question(&long[..2_000_000]), "max_tokens": 1 }).to_string(),
            400,
        ),
        ("/v1/responses", json!({ "input": &long[..2_000_000] }).to_string(), 400),
        ("/tokenize", json!({ "content": &long[..2_000_000] }).to_string(), 400),
        ("/tokenize", json!({ "content": "a b ".repeat(250_000), "with_pieces": true }).to_string(), 413),
        ("/detokenize", format!("{{\"tokens\": {}}}", zeros(2_000_000)), 413),
    ];
    for (path, body, status) in cases {
        let server = start();
        let response = server.call("POST", path, &[], body.as_bytes());
        let about = &body[..120.min(body.len())];
        assert_eq!(response.status, status, "{path} {about}: {}", response.text());
        let peak = server.peak_memory().unwrap();
        assert!(peak < budget, "{} MiB for {path} {about}", peak >> 20);
    }
    // Many at once share what there is: some wait or are told to come again, and it is all given back.
    let server = start();
    let body = chat(&format!("\"tools\": [{}]", tool(&zeros(60_000))));
    let all: Vec<_> = (0..12).map(|_| server.send("POST", CHAT, &[], body.as_bytes())).collect();
    let statuses: Vec<_> = all.into_iter().map(|stream| Response::read(stream).status).collect();
    assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&200), "{statuses:?}");
    let peak = server.peak_memory().unwrap();
    assert!(peak < budget, "{} MiB", peak >> 20);
    assert_eq!(server.call("POST", CHAT, &[], body.as_bytes()).status, 200);
}

/// Compiling such a schema takes hundreds of times its size.
#[cfg(target_os = "linux")]
#[test]
fn what_compiling_grammars_takes_is_within_the_memory_and_given_back_to_the_system() {
    let server = Server::start(&["--device", "cpu", "--threads", "1", "--memory", "128M"]);
    let level = server.resident_memory().unwrap();
    let patterns = |count: usize| {
        let field = |i: usize| json!({ "type": "string", "pattern": format!("^a{{{}}}(b|c)*$", i % 50) });
        let fields: serde_json::Map<_, _> = (0..count).map(|i| (format!("f{i}"), field(i))).collect();
        let schema = json!({ "name": "x", "schema": { "type": "object", "properties": fields } });
        let format = json!({ "type": "json_schema", "json_schema": schema });
        json!({ "messages": question("Hi"), "max_tokens": 2, "response_format": format }).to_string()
    };
    let body = patterns(800);
    let all: Vec<_> = (0..6).map(|_| server.send("POST", CHAT, &[], body.as_bytes())).collect();
    let statuses: Vec<_> = all.into_iter().map(|stream| Response::read(stream).status).collect();
    // The library finds that the grammar is too complex when it has compiled it.
    assert!(statuses.iter().all(|status| [400, 429, 503].contains(status)), "{statuses:?}");
    let peak = server.peak_memory().unwrap();
    assert!(peak < 128 << 20, "{} MiB", peak >> 20);
    assert_eq!(server.call("POST", CHAT, &[], patterns(10).as_bytes()).status, 200);
    // The vocabulary of grammars stays, which the first of them made.
    let most = level + (24 << 20);
    let start = Instant::now();
    while server.resident_memory().unwrap() > most {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "{} MiB stay",
            server.resident_memory().unwrap() >> 20
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_prompt_that_is_too_long_for_the_context_can_still_be_counted() {
    let server = Server::start(&[]);
    let messages = question(&"word ".repeat(40_000));
    let counted = server.post("/v1/messages/count_tokens", &json!({ "messages": messages })).ok();
    assert!(counted["input_tokens"].as_u64().unwrap() > 1024);
    assert!(
        server.post("/tokenize", &json!({ "messages": messages })).ok()["count"].as_u64().unwrap() > 1024
    );
    server.post("/apply-template", &json!({ "messages": messages })).ok();
    let refused = server.post(CHAT, &json!({ "messages": messages }));
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
}

#[test]
fn time_grows_with_the_size_of_a_request_and_not_with_its_square() {
    const SMALL: usize = 4_000;
    const LARGE: usize = 40_000;
    let server = Server::start(&[]);
    let many = |n: usize, one: &dyn Fn(usize) -> Value| (0..n).map(one).collect::<Vec<Value>>();
    let map =
        |n: usize, value: Value| -> Value { (0..n).map(|i| (format!("k{i}"), value.clone())).collect() };
    let user = |_: usize| json!({ "role": "user", "content": "a" });
    let function =
        |i: usize| json!({ "type": "function", "function": { "name": format!("f{i}"), "parameters": {} } });
    let call = |i: usize| json!({ "id": format!("c{i}"), "type": "function", "function": { "name": "f", "arguments": "{}" } });
    let tool = |i: usize| json!({ "type": "function", "name": format!("f{i}") });
    let called = |i: usize| json!({ "type": "function_call", "call_id": format!("c{i}"), "name": "f", "arguments": "{}" });
    let result =
        |i: usize| json!({ "type": "function_call_output", "call_id": format!("c{i}"), "output": "x" });
    let said = |_: usize| json!({ "role": "assistant", "content": "what somebody says may be of some length ".repeat(3) });
    let block = |_: usize| json!({ "type": "text", "text": "a" });
    let used = |i: usize| json!({ "type": "tool_use", "id": format!("c{i}"), "name": "f", "input": {} });
    let returned =
        |i: usize| json!({ "type": "tool_result", "tool_use_id": format!("c{i}"), "content": "x" });
    let (responses, messages) = ("/v1/responses", "/v1/messages");
    type Make<'a> = Box<dyn Fn(usize) -> Value + 'a>;
    let with = |path: &'static str, more: Make<'static>| -> (&'static str, Make<'static>) {
        let make = move |n| {
            let mut body = match path {
                "/v1/responses" => json!({ "input": "a", "max_output_tokens": 16 }),
                "/v1/completions" => json!({ "prompt": "a", "max_tokens": 1 }),
                _ => json!({ "messages": question("a"), "max_tokens": 1 }),
            };
            body.as_object_mut().unwrap().extend(more(n).as_object().unwrap().clone());
            body
        };
        (path, Box::new(make))
    };
    let turn = |assistant: Vec<Value>, user: Vec<Value>| json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": assistant }, { "role": "user", "content": user }]);
    let cases: Vec<(&str, Make)> = vec![
        with(CHAT, Box::new(move |n| json!({ "messages": many(n, &user) }))),
        with(
            CHAT,
            Box::new(move |n| json!({ "messages": [{ "role": "user", "content": many(n, &block) }] })),
        ),
        with(
            CHAT,
            Box::new(
                move |n| json!({ "messages": [{ "role": "assistant", "content": "", "tool_calls": many(n, &call) }] }),
            ),
        ),
        with(CHAT, Box::new(move |n| json!({ "tools": many(n, &function) }))),
        with(CHAT, Box::new(move |n| json!({ "tools": many(n, &function), "tool_choice": "required" }))),
        with(
            CHAT,
            Box::new(
                move |n| json!({ "tools": [{ "type": "function", "function": { "name": "f", "parameters": { "properties": map(n, json!({})) } } }] }),
            ),
        ),
        with(CHAT, Box::new(move |n| json!({ "chat_template_kwargs": map(n, json!(0)) }))),
        with(CHAT, Box::new(move |n| json!({ "chat_template_kwargs": { "k": vec![0; n] } }))),
        with(CHAT, Box::new(move |n| json!({ "stop": vec!["x"; n] }))),
        with(
            CHAT,
            Box::new(
                move |n| json!({ "logit_bias": (0..n).map(|i| (i.to_string(), json!(0))).collect::<Value>() }),
            ),
        ),
        with(CHAT, Box::new(move |n| map(n, json!(0)))),
        with(
            CHAT,
            Box::new(move |n| {
                let mut all = map(n, json!(0));
                all["messages"] = 7.into();
                all
            }),
        ),
        with("/v1/completions", Box::new(move |n| json!({ "prompt": vec!["a"; n] }))),
        with("/v1/completions", Box::new(move |n| json!({ "prompt": vec![5; n] }))),
        with("/v1/completions", Box::new(move |n| json!({ "prompt": vec![[5]; n] }))),
        with(responses, Box::new(move |n| json!({ "input": many(n, &user) }))),
        with(responses, Box::new(move |n| json!({ "input": many(n, &said) }))),
        with(
            responses,
            Box::new(move |n| json!({ "input": Value::from([many(n, &called), many(n, &result)].concat()) })),
        ),
        with(
            responses,
            Box::new(
                move |n| json!({ "input": many(n, &|_| json!({ "type": "reasoning", "content": [{ "text": "x" }] })) }),
            ),
        ),
        with(
            responses,
            Box::new(
                move |n| json!({ "input": [{ "role": "user", "content": many(n, &|_| json!({ "type": "input_text", "text": "a" })) }] }),
            ),
        ),
        with(
            responses,
            Box::new(
                move |n| json!({ "tools": many(n, &tool), "tool_choice": { "type": "allowed_tools", "mode": "auto", "tools": many(n, &tool) } }),
            ),
        ),
        with(
            responses,
            Box::new(move |n| json!({ "include": vec!["x"; n], "metadata": map(n, json!("x")) })),
        ),
        with(messages, Box::new(move |n| json!({ "messages": many(n, &user) }))),
        with(
            messages,
            Box::new(move |n| json!({ "messages": [{ "role": "user", "content": many(n, &block) }] })),
        ),
        with(messages, Box::new(move |n| json!({ "messages": turn(many(n, &used), many(n, &returned)) }))),
        with(
            messages,
            Box::new(move |n| json!({ "system": many(n, &block), "stop_sequences": vec!["x"; n] })),
        ),
        with(
            messages,
            Box::new(
                move |n| json!({ "tools": many(n, &|i| json!({ "name": format!("f{i}"), "input_schema": {} })) }),
            ),
        ),
        with("/v1/messages/count_tokens", Box::new(move |n| json!({ "messages": many(n, &user) }))),
        with("/tokenize", Box::new(move |n| json!({ "messages": many(n, &user) }))),
        ("/tokenize", Box::new(|n| json!({ "content": "a b ".repeat(n) }))),
        ("/tokenize", Box::new(|n| json!({ "content": "ab".repeat(n) }))),
        ("/detokenize", Box::new(|n| json!({ "tokens": vec![5; n] }))),
        with("/apply-template", Box::new(move |n| json!({ "messages": many(n, &user) }))),
    ];
    for (i, (path, make)) in cases.iter().enumerate() {
        let time = |n: usize| {
            let body = make(n).to_string();
            let start = Instant::now();
            let response = server.call("POST", path, &[], body.as_bytes());
            assert!(response.status < 500, "{path}: {}", response.text());
            start.elapsed()
        };
        // Ten times the size takes about ten times as long, or a hundred times if it is by the square. What is quick may take as
        // long as it likes, and what is slow once may be so because other programs run, too.
        let mut tried = Vec::new();
        let is_linear = (0..4).any(|_| {
            let (small, large) = (time(SMALL), time(LARGE));
            tried.push((small, large));
            large < (small * 30).max(Duration::from_secs(3))
        });
        assert!(is_linear, "case {i}, {path}: times for {SMALL} and {LARGE} are {tried:?}");
    }
}

#[test]
fn uploads_that_take_their_time_keep_no_others_waiting() {
    let server = Server::start(&[]);
    let slow: Vec<_> = (0..8)
        .map(|_| {
            let mut stream = server.connect();
            let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 8000000\r\n\r\n");
            stream.write_all(head.as_bytes()).unwrap();
            // More than is read without a second thought.
            stream.write_all(&vec![b' '; 600_000]).unwrap();
            stream
        })
        .collect();
    let body = json!({ "messages": question("Hello"), "max_tokens": 1, "unknown": "x".repeat(1_000_000) });
    let start = Instant::now();
    server.post(CHAT, &body).ok();
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    drop(slow);
}

#[test]
fn the_log_does_not_quote_what_users_write() {
    let server = Server::start(&[]);
    let secret = "the combination of the safe";
    let image = json!([{ "role": secret, "content": [{ "type": secret }] }]);
    for body in [
        json!({ "messages": image }),
        json!({ "messages": question("a"), "tool_choice": { "type": "function", "function": { "name": secret } } }),
        json!({ "messages": question("a"), "logit_bias": { secret: 1 } }),
        json!({ "messages": question("a"), "response_format": { "type": "json_schema", "json_schema": { "schema": { "type": secret } } } }),
        json!({ "messages": secret }),
    ] {
        assert_eq!(server.post(CHAT, &body).status, 400, "{body}");
    }
    // What is wrong is there all the same.
    let start = Instant::now();
    while server.log().matches("400 after").count() < 5 {
        assert!(start.elapsed() < Duration::from_secs(30), "{}", server.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(server.log().contains("in logit_bias"), "{}", server.log());
    assert!(!server.log().contains("combination"), "{}", server.log());
}
