//! `forebay serve`: answers that are held to a form, calls of tools, and reasoning.

use serde_json::{Value, json};

use crate::common;
use crate::common::server::{Server, question};

const CHAT: &str = "/v1/chat/completions";

/// A template of a model that calls tools and reasons. What the demo model makes of it is of no concern: the answers here
/// are held to a form.
const TEMPLATE: &str = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}
<tool_call>{\"name\": …, \"arguments\": …}</tool_call><|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n
{%- if m.content %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}<tool_call>{\"name\": \"{{ call.function.name }}\", \
\"arguments\": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}";

fn start() -> Server {
    start_with(&[])
}

fn start_with(args: &[&str]) -> Server {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), TEMPLATE).unwrap();
    Server::start(&[&["--chat-template-file", &common::text(file.path())], args].concat())
}

fn tool(name: &str) -> Value {
    let colour = json!({ "type": "string", "enum": ["red", "green"] });
    let parameters = json!({
        "type": "object",
        "properties": { "colour": colour, "count": { "type": "integer", "minimum": 0, "maximum": 9 } },
        "required": ["colour", "count"],
        "additionalProperties": false,
    });
    json!({ "type": "function", "function": { "name": name, "parameters": parameters } })
}

fn ask(more: Value) -> Value {
    let mut body =
        json!({ "messages": question("Which balls?"), "max_tokens": 200, "temperature": 0.7, "seed": 3 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The arguments must be what the tool asks for.
#[track_caller]
fn check(arguments: &str) {
    let arguments: Value = serde_json::from_str(arguments).unwrap_or_else(|_| panic!("{arguments}"));
    assert!(["red", "green"].contains(&arguments["colour"].as_str().unwrap()), "{arguments}");
    assert!(arguments["count"].as_u64().unwrap() < 10, "{arguments}");
    assert_eq!(arguments.as_object().unwrap().len(), 2);
}

#[test]
fn answers_have_the_form_that_was_asked_for() {
    let server = start();
    let schema = tool("x")["function"]["parameters"].clone();
    for strict in [true, false] {
        let format = json!({ "type": "json_schema", "json_schema": { "name": "balls", "strict": strict, "schema": schema } });
        let body = ask(json!({ "response_format": format }));
        let whole = server.post(CHAT, &body).ok();
        let content = whole["choices"][0]["message"]["content"].as_str().unwrap();
        check(content);
        assert_eq!(whole["choices"][0]["finish_reason"], "stop");
        let chunks = server.stream(CHAT, &body).chunks();
        let pieces: Vec<_> =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
        assert!(pieces.len() > 3, "it comes as it is written: {pieces:?}");
        assert_eq!(pieces.concat(), content);
    }
    let any = server
        .post(CHAT, &ask(json!({ "response_format": { "type": "json_object" }, "max_tokens": 400 })))
        .ok();
    let choice = &any["choices"][0];
    let content = choice["message"]["content"].as_str().unwrap();
    assert!(content.trim_start().starts_with('{'), "{content}");
    if choice["finish_reason"] == "stop" {
        assert!(serde_json::from_str::<Value>(content).unwrap().is_object());
    }
    // Other ways to say it.
    let with_schema = json!({ "response_format": { "type": "json_object", "schema": schema } });
    for more in [with_schema, json!({ "json_schema": schema })] {
        check(server.post(CHAT, &ask(more)).ok()["choices"][0]["message"]["content"].as_str().unwrap());
    }
    let text = json!({ "prompt": "x", "json_schema": schema, "max_tokens": 200 });
    check(server.post("/v1/completions", &text).ok()["choices"][0]["text"].as_str().unwrap());
    let wrong =
        json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": { "type": "colour" } } });
    let refused = server.post(CHAT, &ask(json!({ "response_format": wrong })));
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("response_format")));
    // With tools the answer has the form, or is a call.
    let format = json!({ "type": "json_schema", "json_schema": { "name": "balls", "schema": schema } });
    for seed in 0..6 {
        let both = json!({ "response_format": format, "tools": [tool("f")], "temperature": 2, "seed": seed });
        let message = &server.post(CHAT, &ask(both)).ok()["choices"][0]["message"];
        match message["content"].as_str() {
            Some(content) => check(content),
            None => check(message["tool_calls"][0]["function"]["arguments"].as_str().unwrap()),
        }
    }
}

#[test]
fn calls_that_are_required_are_made() {
    let server = start();
    let tools = json!([tool("take"), tool("leave")]);
    for choice in [json!("required"), json!({ "type": "function", "function": { "name": "leave" } })] {
        let body = ask(json!({ "tools": tools, "tool_choice": choice, "parallel_tool_calls": false }));
        let whole = server.post(CHAT, &body).ok();
        let message = &whole["choices"][0]["message"];
        assert_eq!(
            (&message["content"], &whole["choices"][0]["finish_reason"]),
            (&Value::Null, &json!("tool_calls"))
        );
        let calls = message["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1, "{message}");
        let (call, function) = (&calls[0], &calls[0]["function"]);
        assert!(call["id"].as_str().unwrap().starts_with("call_"));
        assert_eq!(call["type"], "function");
        let name = function["name"].as_str().unwrap();
        assert!(name == "leave" || (choice == "required" && name == "take"), "{call}");
        check(function["arguments"].as_str().unwrap());

        let chunks = server.stream(CHAT, &body).chunks();
        let pieces: Vec<_> =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].get(0)).collect();
        let (first, rest) = pieces.split_first().unwrap();
        assert!(first["id"].as_str().unwrap().starts_with("call_"));
        assert_eq!((&first["index"], &first["type"]), (&json!(0), &json!("function")));
        assert_eq!(first["function"], json!({ "name": name, "arguments": "" }));
        assert!(
            rest.iter().all(|piece| piece.get("id").is_none() && piece["function"].get("name").is_none())
        );
        let arguments: String =
            rest.iter().map(|piece| piece["function"]["arguments"].as_str().unwrap()).collect();
        assert_eq!(arguments, function["arguments"].as_str().unwrap());
        assert!(chunks.iter().all(|chunk| !chunk["choices"][0]["delta"]["content"].is_string()));
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    }
}

#[test]
fn functions_of_namespaces_are_called_by_the_names_that_the_client_gave() {
    let server = start();
    let function = |name: &str| {
        let mut function = tool(name)["function"].clone();
        function["type"] = "function".into();
        function
    };
    // As Codex describes the tools of a server that speaks MCP.
    let balls = json!({ "type": "namespace", "name": "mcp__balls", "description": "Tools for balls.",
        "tools": [function("take"), function("leave")] });
    let call = json!({ "type": "function_call", "call_id": "c1", "namespace": "mcp__balls", "name": "leave",
        "arguments": "{\"colour\": \"red\", \"count\": 1}" });
    let body = json!({
        "input": [
            { "role": "user", "content": "Which balls?" },
            call,
            { "type": "function_call_output", "call_id": "c1", "output": "done" },
        ],
        "tools": [function("take"), balls],
        "tool_choice": { "type": "function", "namespace": "mcp__balls", "name": "leave" },
        "max_output_tokens": 200,
    });
    let whole = server.post("/v1/responses", &body).ok();
    let events = server.stream("/v1/responses", &body).events();
    let streamed = &events.iter().find(|event| event["type"] == "response.output_item.done").unwrap()["item"];
    for item in [&whole["output"][0], streamed] {
        assert_eq!(item["type"], "function_call");
        assert_eq!((&item["namespace"], &item["name"]), (&json!("mcp__balls"), &json!("leave")));
        check(item["arguments"].as_str().unwrap());
    }
    // One that is in no namespace has none.
    let mut alone = body.clone();
    alone["tool_choice"] =
        json!({ "type": "allowed_tools", "mode": "required", "tools": [{ "name": "take" }] });
    alone["tools"] = json!([function("take")]);
    let item = server.post("/v1/responses", &alone).ok()["output"][0].clone();
    assert_eq!((item.get("namespace"), &item["name"]), (None, &json!("take")));
}

#[test]
fn an_answer_goes_on_where_the_end_is_to_be_ignored() {
    let server = start();
    // What the model would like best is to end.
    let end = server.post("/tokenize", &json!({ "content": "<|im_end|>" })).ok()["tokens"][0].to_string();
    let body = ask(json!({ "logit_bias": { end: 50 }, "max_tokens": 5 }));
    assert_eq!(server.post(CHAT, &body).ok()["choices"][0]["finish_reason"], "stop");
    let mut body = body;
    body["ignore_eos"] = true.into();
    let on = server.post(CHAT, &body).ok();
    assert_eq!(
        (&on["choices"][0]["finish_reason"], &on["usage"]["completion_tokens"]),
        (&json!("length"), &json!(5))
    );
}

#[test]
fn a_conversation_with_calls_goes_back_to_the_template() {
    let server = start();
    let call = json!({ "id": "call_1", "type": "function", "function": { "name": "take", "arguments": "{\"colour\": \"red\", \"count\": 2}" } });
    let messages = json!([
        { "role": "user", "content": "Which balls?" },
        { "role": "assistant", "content": null, "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "call_1", "content": [{ "type": "text", "text": "Taken." }] },
    ]);
    let prompt =
        server.post("/apply-template", &json!({ "messages": messages, "tools": [tool("take")] })).ok();
    let prompt = prompt["prompt"].as_str().unwrap();
    assert!(
        prompt.contains(
            r#"<tool_call>{"name": "take", "arguments": {"colour": "red", "count": 2}}</tool_call>"#
        ),
        "{prompt}"
    );
    assert!(prompt.contains("<|im_start|>toolTaken."), "{prompt}");
    let answer =
        server.post(CHAT, &json!({ "messages": messages, "tools": [tool("take")], "max_tokens": 3 })).ok();
    assert!(answer["usage"]["prompt_tokens"].as_u64().unwrap() > 50);
}

#[test]
fn tools_that_must_not_be_called_are_told_of_and_not_called() {
    let server = start();
    // What the model would like best is a control token, which no text has.
    let tokens = server.post("/tokenize", &json!({ "content": "<|im_start|>" })).ok()["tokens"].clone();
    let control = tokens[0].to_string();
    let mut body = ask(json!({ "tools": [tool("take")], "logit_bias": { control: 100 }, "max_tokens": 12 }));
    let auto = server.post(CHAT, &body).ok();
    assert_eq!(auto["choices"][0]["message"]["content"], "");
    body["tool_choice"] = "none".into();
    let none = server.post(CHAT, &body).ok();
    assert_eq!(none["usage"]["prompt_tokens"], auto["usage"]["prompt_tokens"]);
    assert!(none["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 50, "{none}");
    let message = &none["choices"][0]["message"];
    assert!(message.get("tool_calls").is_none(), "{message}");
    assert!(!message["content"].as_str().unwrap().is_empty(), "{message}");
    // The same in the other APIs.
    let body = json!({ "input": "Which balls?", "tools": [{ "type": "function", "name": "take" }],
        "tool_choice": "none", "max_output_tokens": 12 });
    let response = server.post("/v1/responses", &body).ok();
    assert_eq!(response["output"][0]["type"], "message", "{response}");
    let body = json!({ "messages": question("Which balls?"), "max_tokens": 12, "tool_choice": { "type": "none" },
        "tools": [{ "name": "take", "input_schema": { "type": "object" } }] });
    let message = server.post("/v1/messages", &body).ok();
    assert_eq!(message["content"][0]["type"], "text", "{message}");
}

#[test]
fn reasoning_is_told_apart() {
    let server = start();
    let body = ask(json!({ "chat_template_kwargs": { "enable_thinking": true }, "max_tokens": 12 }));
    let whole = server.post(CHAT, &body).ok();
    let message = &whole["choices"][0]["message"];
    // The demo model never ends its reasoning.
    let reasoning = message["reasoning_content"].as_str().unwrap();
    assert_eq!(message["content"], "");
    assert_eq!(
        whole["usage"]["completion_tokens_details"]["reasoning_tokens"],
        whole["usage"]["completion_tokens"]
    );
    let chunks = server.stream(CHAT, &body).chunks();
    let streamed: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["reasoning_content"].as_str())
        .collect();
    assert_eq!(streamed, reasoning);
    // With a form, reasoning comes first and the form after it.
    let schema = tool("x")["function"]["parameters"].clone();
    let format = json!({ "type": "json_schema", "json_schema": { "name": "balls", "schema": schema } });
    let mut body =
        ask(json!({ "response_format": format, "chat_template_kwargs": { "enable_thinking": false } }));
    check(server.post(CHAT, &body).ok()["choices"][0]["message"]["content"].as_str().unwrap());
    body["reasoning_effort"] = "none".into();
    body["chat_template_kwargs"] = json!({});
    check(server.post(CHAT, &body).ok()["choices"][0]["message"]["content"].as_str().unwrap());
}

#[test]
fn reasoning_has_the_length_that_was_asked_for() {
    let server = start_with(&["--think-budget", "20"]);
    let kwargs = json!({ "enable_thinking": true });
    // What ends reasoning is counted with it.
    let reasoned = |usage: &Value, most: u64| {
        let tokens = usage.as_u64().unwrap();
        assert!(tokens >= most && tokens < most + 12, "{tokens} of {most}");
    };
    for (budget, most) in [(json!(6), 6), (json!(500), 20), (json!(-1), 20), (json!(null), 20)] {
        let body =
            ask(json!({ "chat_template_kwargs": kwargs, "thinking_budget": budget, "max_tokens": 60 }));
        let answer = server.post(CHAT, &body).ok();
        let message = &answer["choices"][0]["message"];
        assert!(!message["reasoning_content"].as_str().unwrap().is_empty(), "{message}");
        assert!(!message["content"].as_str().unwrap().is_empty(), "{message}");
        reasoned(&answer["usage"]["completion_tokens_details"]["reasoning_tokens"], most);
    }
    // A form that comes after reasoning comes.
    let schema = tool("x")["function"]["parameters"].clone();
    let format = json!({ "type": "json_schema", "json_schema": { "name": "balls", "schema": schema } });
    let body = ask(json!({ "response_format": format, "chat_template_kwargs": kwargs }));
    check(server.post(CHAT, &body).ok()["choices"][0]["message"]["content"].as_str().unwrap());

    let body = json!({ "messages": question("Which balls?"), "max_tokens": 60, "temperature": 0,
        "thinking": { "type": "enabled", "budget_tokens": 8 } });
    let message = server.post("/v1/messages", &body).ok();
    let kinds: Vec<_> = message["content"].as_array().unwrap().iter().map(|block| &block["type"]).collect();
    assert_eq!(kinds, ["thinking", "text"], "{message}");
    reasoned(&message["usage"]["output_tokens_details"]["thinking_tokens"], 8);
}
