//! Anthropic's messages, OpenAI's responses, and configuration for clients.

use serde_json::{Value, json};

use crate::common::call;
use crate::common::server::{Response, Server, question};

const STORY: &str = "Tell me a story about a cat.";

fn message(fields: Value) -> Value {
    let mut body = json!({ "model": "any", "max_tokens": 30, "temperature": 0, "messages": question(STORY) });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn response(fields: Value) -> Value {
    let mut body = json!({ "model": "any", "max_output_tokens": 30, "temperature": 0, "input": STORY });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

/// The message of an error in Anthropic's shape.
#[track_caller]
fn refusal(response: &Response, status: u16, kind: &str) -> String {
    assert_eq!(response.status, status, "{}", response.text());
    let body = response.json();
    assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(kind)), "{body}");
    body["error"]["message"].as_str().unwrap().to_owned()
}

#[test]
fn a_message_is_the_same_whole_and_in_pieces() {
    let server = Server::start(&[]);
    let whole = server.post("/v1/messages", &message(json!({ "system": "You tell stories." }))).ok();
    assert_eq!(
        (&whole["type"], &whole["role"], &whole["stop_reason"]),
        (&json!("message"), &json!("assistant"), &json!("max_tokens"))
    );
    assert_eq!(whole["content"].as_array().unwrap().len(), 1);
    assert_eq!(whole["usage"]["output_tokens"], 30);
    let events = server.stream("/messages", &message(json!({ "system": "You tell stories." }))).events();
    let names = types(&events);
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    assert!(names[2..names.len() - 3].iter().all(|name| *name == "content_block_delta"), "{names:?}");
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(whole["content"][0], json!({ "type": "text", "text": text }));
    let (start, delta) = (&events[0]["message"], &events[names.len() - 2]);
    assert_eq!((&start["stop_reason"], &start["content"]), (&Value::Null, &json!([])));
    assert_eq!(delta["delta"], json!({ "stop_reason": "max_tokens", "stop_sequence": null }));
    // What the first request has computed the second has not to.
    let read = |usage: &Value, field: &str| usage[field].as_u64().unwrap();
    assert!(read(&delta["usage"], "cache_read_input_tokens") > 0);
    let all = |usage: &Value| read(usage, "input_tokens") + read(usage, "cache_read_input_tokens");
    assert_eq!(all(&delta["usage"]), all(&whole["usage"]));
    let counted = json!({ "messages": question(STORY), "system": "You tell stories." });
    assert_eq!(server.post("/v1/messages/count_tokens", &counted).ok()["input_tokens"], all(&whole["usage"]));
}

#[test]
fn the_stop_sequence_that_was_met_is_told() {
    let server = Server::start(&[]);
    let whole = server.post("/v1/messages", &message(json!({}))).ok();
    let text = whole["content"][0]["text"].as_str().unwrap();
    let stop: String = text.chars().skip(20).take(4).collect();
    let cut = server.post("/v1/messages", &message(json!({ "stop_sequences": ["no such text", stop] }))).ok();
    assert_eq!((&cut["stop_reason"], &cut["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
    assert_eq!(cut["content"][0]["text"], text[..text.find(&stop).unwrap()]);
}

#[test]
fn lines_that_differ_with_every_request_do_not_hide_what_was_cached() {
    let server = Server::start(&[]);
    let usage = |number: usize| {
        let line = format!("x-anthropic-billing-header: cc_version=2.{number}; cch={number};");
        let system = json!([{ "type": "text", "text": line }, { "type": "text", "text": "Be kind to cats and dogs." }]);
        server.post("/v1/messages", &message(json!({ "system": system }))).ok()["usage"].clone()
    };
    let (first, second) = (usage(1), usage(2));
    assert_eq!(first["cache_read_input_tokens"], 0);
    // The last token is computed in any case.
    assert!(second["input_tokens"].as_u64().unwrap() <= 2, "{second}");
}

#[test]
fn errors_of_messages_are_in_anthropics_words() {
    let server = Server::start(&["--api-key", "open sesame"]);
    let ask = |fields: Value| server.post("/v1/messages", &message(fields));
    let invalid = |fields: Value| refusal(&ask(fields), 400, "invalid_request_error");
    assert_eq!(invalid(json!({ "max_tokens": null })), "max_tokens: Field required");
    assert!(invalid(json!({ "max_tokens": 0 })).starts_with("max_tokens"));
    assert!(invalid(json!({ "temperature": -1 })).starts_with("temperature"));
    assert!(invalid(json!({ "stop_sequences": [""] })).starts_with("stop_sequences: "));
    let picture = json!([{ "role": "user", "content": [{ "type": "image", "source": {} }] }]);
    assert!(invalid(json!({ "messages": picture })).starts_with("messages.0.content.0: "));
    assert!(invalid(json!({ "messages": [] })).contains("no messages"));
    let long = invalid(json!({ "messages": question(&"cat ".repeat(2000)) }));
    assert!(long.contains("prompt is too long") && long.contains("> 1024 maximum"), "{long}");
    assert_eq!(ask(json!({ "max_tokens": null })).header("x-should-retry"), Some("false"));
    refusal(&server.get("/v1/messages"), 405, "invalid_request_error");
    refusal(&server.post("/v1/messages/batches", &json!({})), 404, "not_found_error");
    let body = message(json!({})).to_string();
    let wrong = server.call("POST", "/v1/messages", &[("x-api-key", "open")], body.as_bytes());
    refusal(&wrong, 401, "authentication_error");
    let right = server.call("POST", "/v1/messages", &[("x-api-key", "open sesame")], body.as_bytes());
    assert_eq!(right.status, 200, "{}", right.text());
}

#[test]
fn what_a_message_cannot_be_is_refused_by_name() {
    let server = Server::start(&[]);
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let refused = server.post(path, &message(json!({ "thread": { "type": "create" } })));
        assert!(refusal(&refused, 400, "invalid_request_error").starts_with("thread is not supported"));
        // This tells Anthropic's libraries to go on without threads.
        let details = json!({ "error_code": "thread_unsupported_request", "unsupported": ["thread"] });
        assert_eq!(refused.json()["error"]["details"], details);
        for (fields, said) in [
            (json!({ "compaction": { "type": "summarize" } }), "compaction"),
            (json!({ "container": "c" }), "container"),
            (
                json!({ "context_management": { "edits": [{ "type": "compact" }] } }),
                "context_management.edits.0",
            ),
            (json!({ "grammar": "root ::= \"x\"" }), "grammar"),
        ] {
            let refused = server.post(path, &message(fields));
            assert!(refusal(&refused, 400, "invalid_request_error").starts_with(said));
            assert_eq!(refused.json()["error"].get("details"), None);
        }
    }
    // What Claude Code sends asks for nothing.
    let usual = json!({
        "thread": null, "diagnostics": null, "service_tier": "auto", "metadata": { "user_id": "me" },
        "context_management": { "edits": [{ "type": "clear_thinking_20251015", "keep": "all" }] },
        "output_config": { "effort": "high" }, "thinking": { "type": "adaptive" }, "mcp_servers": [],
    });
    let answer = server.post("/v1/messages", &message(usual)).ok();
    // Fields of OpenAI's API are not ignored.
    let stop = answer["content"][0]["text"].as_str().unwrap().chars().skip(10).take(5).collect::<String>();
    let cut = server.post("/v1/messages", &message(json!({ "stop": stop }))).ok();
    assert_eq!(cut["stop_sequence"], stop);
}

#[test]
fn a_model_that_is_not_there_is_told_in_the_words_of_who_asks() {
    let server = Server::start(&[]);
    let theirs = [("anthropic-version", "2023-06-01")];
    let error = server.call("GET", "/v1/models/none", &theirs, b"");
    assert!(refusal(&error, 404, "not_found_error").contains("none"));
    let ours = server.get("/v1/models/none").json();
    assert_eq!((&ours["error"]["code"], ours.get("type")), (&json!("model_not_found"), None));
}

#[test]
fn a_response_is_the_same_whole_and_in_pieces() {
    let server = Server::start(&[]);
    let asked = json!({ "instructions": "You tell stories.", "store": true, "metadata": { "a": "b" } });
    let whole = server.post("/v1/responses", &response(asked.clone())).ok();
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("incomplete")));
    assert_eq!(whole["incomplete_details"], json!({ "reason": "max_output_tokens" }));
    assert_eq!((&whole["metadata"], &whole["store"]), (&json!({ "a": "b" }), &json!(false)));
    let events = server.stream("/responses", &response(asked)).events();
    let names = types(&events);
    let first = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ];
    assert_eq!(names[..4], first);
    let last = [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(names[names.len() - 4..], last);
    assert!(names[4..names.len() - 4].iter().all(|name| *name == "response.output_text.delta"), "{names:?}");
    assert!(events.iter().enumerate().all(|(i, event)| event["sequence_number"] == i));
    let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(whole["output"][0]["content"][0]["text"], text);
    let end = &events.last().unwrap()["response"];
    assert_eq!(end["output"][0]["content"], whole["output"][0]["content"]);
    assert_eq!(end["id"], events[0]["response"]["id"]);
    assert!(end["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0);
}

#[test]
fn a_conversation_of_items_is_one_of_messages() {
    let server = Server::start(&[]);
    let input = json!([
        { "role": "user", "content": [{ "type": "input_text", "text": "Tell me about a cat." }] },
        { "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": "It is red." }] },
        { "role": "user", "content": "Tell me more." },
    ]);
    let messages = json!([
        { "role": "system", "content": "Be kind." },
        { "role": "user", "content": "Tell me about a cat." },
        { "role": "assistant", "content": "It is red." },
        { "role": "user", "content": "Tell me more." },
    ]);
    let response =
        server.post("/v1/responses", &response(json!({ "input": input, "instructions": "Be kind." }))).ok();
    let chat = json!({ "messages": messages, "max_tokens": 30, "temperature": 0 });
    let chat = server.post("/v1/chat/completions", &chat).ok();
    assert_eq!(response["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(response["output"][0]["content"][0]["text"], chat["choices"][0]["message"]["content"]);
}

#[test]
fn what_a_response_cannot_be_is_refused_by_name() {
    let server = Server::start(&[]);
    for (fields, param) in [
        (json!({ "previous_response_id": "resp_1" }), "previous_response_id"),
        (json!({ "conversation": "conv_1" }), "conversation"),
        (json!({ "background": true }), "background"),
        (json!({ "context_management": [{ "type": "compaction" }] }), "context_management"),
        (json!({ "grammar": "root ::= \"x\"" }), "grammar"),
        (
            json!({ "tools": [{ "type": "namespace", "name": "n", "tools": [{ "type": "custom" }] }] }),
            "tools[0].tools[0].type",
        ),
        (json!({ "input": null }), "input"),
        (json!({ "input": [] }), "input"),
        (json!({ "input": [{ "type": "item_reference", "id": "x" }] }), "input[0]"),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
        (json!({ "tool_choice": "maybe" }), "tool_choice"),
        (json!({ "max_output_tokens": 0 }), "max_output_tokens"),
        (json!({ "temperature": -1 }), "temperature"),
        (json!({ "top_logprobs": 21 }), "top_logprobs"),
        (json!({ "text": { "format": { "type": "xml" } } }), "text.format.type"),
        (json!({ "input": "cat ".repeat(2000) }), "input"),
    ] {
        let refused = server.post("/v1/responses", &response(fields.clone()));
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!(param)), "{fields}");
        assert_eq!(refused.header("x-should-retry"), Some("false"));
    }
}

#[test]
fn clients_are_told_how_to_use_the_server_without_it() {
    for client in ["opencode", "claude-code", "codex", "continue", "open-webui", "aider"] {
        let args = ["serve", "--print-config", client, "--port", "9000", "--alias", "owner/name"];
        let told = call(&args);
        assert_eq!(told.code, Some(0), "{told:?}");
        assert!(
            told.stdout.contains("http://127.0.0.1:9000") && told.stdout.contains("owner/name"),
            "{told:?}"
        );
        assert_eq!(told.stderr.lines().count(), 1, "{told:?}");
    }
    let codex = call(&["serve", "--print-config", "codex"]).stdout;
    assert!(codex.contains("model_context_window = 1024\n"), "{codex}");
    // Without a client it says what it says elsewhere.
    assert!(call(&["serve", "--print-config"]).success().contains("memory"));
    let unknown = call(&["serve", "--print-config", "no-such-client"]);
    assert!(unknown.code == Some(2) && unknown.stderr.contains("opencode"), "{unknown:?}");
}
