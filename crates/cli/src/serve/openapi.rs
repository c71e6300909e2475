//! `/openapi.json`: what the server answers, for machines.

use serde_json::{Map, Value, json};

use super::body::Json;

/// An address, and what is to be known of it.
struct Operation {
    path: &'static str,
    method: &'static str,
    summary: &'static str,
    /// Fields of the body, each with a schema.
    fields: fn() -> Value,
    required: &'static [&'static str],
    /// Whether the answer may be a stream of events.
    streams: bool,
}

const OPERATIONS: &[Operation] = &[
    Operation {
        fields: chat_fields,
        required: &["messages"],
        streams: true,
        ..post("/v1/chat/completions", "The next message of a conversation")
    },
    Operation {
        fields: completion_fields,
        required: &["prompt"],
        streams: true,
        ..post("/v1/completions", "A text, continued as it is")
    },
    Operation {
        fields: response_fields,
        required: &["input"],
        streams: true,
        ..post("/v1/responses", "The next items of a conversation")
    },
    Operation {
        fields: message_fields,
        required: &["messages", "max_tokens"],
        streams: true,
        ..post("/v1/messages", "The next message of a conversation, in Anthropic's words")
    },
    Operation {
        fields: message_fields,
        required: &["messages"],
        ..post("/v1/messages/count_tokens", "How many tokens a conversation has, in Anthropic's words")
    },
    get("/v1/models", "The model that is loaded"),
    get("/v1/models/{id}", "A model by its name, which may hold slashes"),
    Operation { fields: text_fields, ..post("/tokenize", "The tokens of a text or of a conversation") },
    Operation {
        fields: || json!({ "tokens": tokens() }),
        required: &["tokens"],
        ..post("/detokenize", "The text of tokens")
    },
    Operation {
        fields: text_fields,
        required: &["messages"],
        ..post("/apply-template", "The text of a conversation as the model sees it")
    },
    get("/health", "Whether the process lives"),
    get("/ready", "Whether the model is loaded and computes"),
    get("/metrics", "Counters in Prometheus's text format"),
    get("/props", "What is loaded, and how"),
    get("/openapi.json", "This description"),
];

const fn get(path: &'static str, summary: &'static str) -> Operation {
    Operation { path, method: "get", summary, fields: no_fields, required: &[], streams: false }
}

const fn post(path: &'static str, summary: &'static str) -> Operation {
    Operation { method: "post", ..get(path, summary) }
}

/// The addresses that are described.
#[cfg(test)]
pub fn paths() -> Vec<&'static str> {
    OPERATIONS.iter().map(|operation| operation.path).collect()
}

/// The description.
pub async fn document() -> Json<Value> {
    let paths: Map<String, Value> =
        OPERATIONS.iter().map(|operation| (operation.path.to_owned(), operation.json())).collect();
    Json(json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Forebay",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Addresses that begin with /v1 are there without it, too.",
        },
        "paths": paths,
        "components": { "securitySchemes": { "key": { "type": "http", "scheme": "bearer" } } },
        "security": [{ "key": [] }, {}],
    }))
}

impl Operation {
    fn json(&self) -> Value {
        let mut content = json!({ "application/json": {} });
        if self.path == "/metrics" {
            content = json!({ "text/plain": {} });
        }
        if self.streams {
            content["text/event-stream"] = json!({});
        }
        let mut operation = json!({
            "summary": self.summary,
            "responses": {
                "200": { "description": "The answer", "content": content },
                "default": { "description": "An error", "content": { "application/json": { "schema": error() } } },
            },
        });
        let fields = (self.fields)();
        if !fields.is_null() {
            let schema = json!({ "type": "object", "properties": fields, "required": self.required });
            operation["requestBody"] =
                json!({ "required": true, "content": { "application/json": { "schema": schema } } });
        }
        if self.path.ends_with("{id}") {
            operation["parameters"] =
                json!([{ "name": "id", "in": "path", "required": true, "schema": { "type": "string" } }]);
        }
        json!({ self.method: operation })
    }
}

fn error() -> Value {
    let text = json!({ "type": ["string", "null"] });
    json!({
        "type": "object",
        "properties": { "error": {
            "type": "object",
            "properties": { "message": { "type": "string" }, "type": { "type": "string" }, "param": text, "code": text },
        } },
    })
}

fn no_fields() -> Value {
    Value::Null
}

fn tokens() -> Value {
    json!({ "type": "array", "items": { "type": "integer", "minimum": 0 } })
}

fn messages() -> Value {
    json!({ "type": "array", "items": { "type": "object", "required": ["role"] } })
}

fn text_fields() -> Value {
    json!({
        "content": { "type": "string" },
        "messages": messages(),
        "tools": { "type": "array", "items": { "type": "object" } },
        "chat_template_kwargs": { "type": "object" },
        "add_special": { "type": "boolean" },
        "parse_special": { "type": "boolean" },
        "with_pieces": { "type": "boolean" },
    })
}

/// What chats and continuations have in common.
fn common_fields() -> Map<String, Value> {
    let number = json!({ "type": "number" });
    let integer = json!({ "type": "integer" });
    let boolean = json!({ "type": "boolean" });
    let stop = json!({ "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" } }] });
    let fields = json!({
        "model": { "type": "string" },
        "stream": boolean,
        "stream_options": { "type": "object", "properties": { "include_usage": boolean } },
        "return_progress": boolean,
        "n": { "type": "integer", "minimum": 1, "maximum": 128 },
        "max_tokens": integer,
        "max_completion_tokens": integer,
        "temperature": number,
        "top_p": number,
        "top_k": integer,
        "min_p": number,
        "repeat_penalty": number,
        "presence_penalty": number,
        "frequency_penalty": number,
        "logit_bias": { "type": "object", "additionalProperties": number },
        "seed": integer,
        "stop": stop,
        "response_format": { "type": "object" },
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn chat_fields() -> Value {
    let mut fields = common_fields();
    for (name, schema) in [
        ("messages", messages()),
        ("tools", json!({ "type": "array", "items": { "type": "object" } })),
        ("tool_choice", json!({ "type": ["string", "object"] })),
        ("parallel_tool_calls", json!({ "type": "boolean" })),
        ("logprobs", json!({ "type": "boolean" })),
        ("top_logprobs", json!({ "type": "integer", "minimum": 0, "maximum": 20 })),
        ("reasoning_effort", json!({ "type": "string" })),
        ("thinking_budget", json!({ "type": "integer" })),
        ("chat_template_kwargs", json!({ "type": "object" })),
    ] {
        fields.insert(name.into(), schema);
    }
    fields.into()
}

fn completion_fields() -> Value {
    let mut fields = common_fields();
    for (name, schema) in [
        ("prompt", json!({ "type": ["string", "array"] })),
        ("logprobs", json!({ "type": "integer", "minimum": 0, "maximum": 20 })),
        ("echo", json!({ "type": "boolean" })),
    ] {
        fields.insert(name.into(), schema);
    }
    fields.into()
}

fn response_fields() -> Value {
    let object = json!({ "type": "object" });
    json!({
        "model": { "type": "string" },
        "input": { "anyOf": [{ "type": "string" }, { "type": "array", "items": object }] },
        "instructions": { "type": "string" },
        "stream": { "type": "boolean" },
        "max_output_tokens": { "type": "integer" },
        "temperature": { "type": "number" },
        "top_p": { "type": "number" },
        "top_logprobs": { "type": "integer", "minimum": 0, "maximum": 20 },
        "include": { "type": "array", "items": { "type": "string" } },
        "text": { "type": "object", "properties": { "format": object } },
        "reasoning": { "type": "object", "properties": { "effort": { "type": "string" } } },
        "tools": { "type": "array", "items": object },
        "tool_choice": { "type": ["string", "object"] },
        "parallel_tool_calls": { "type": "boolean" },
    })
}

fn message_fields() -> Value {
    let object = json!({ "type": "object" });
    json!({
        "model": { "type": "string" },
        "messages": { "type": "array", "items": { "type": "object", "required": ["role", "content"] } },
        "system": { "anyOf": [{ "type": "string" }, { "type": "array", "items": object }] },
        "stream": { "type": "boolean" },
        "max_tokens": { "type": "integer", "minimum": 1 },
        "temperature": { "type": "number" },
        "top_p": { "type": "number" },
        "top_k": { "type": "integer" },
        "stop_sequences": { "type": "array", "items": { "type": "string" } },
        "thinking": object,
        "output_config": { "type": "object", "properties": { "effort": { "type": "string" }, "format": object } },
        "tools": { "type": "array", "items": object },
        "tool_choice": object,
    })
}
