//! `/openapi.json`: an OpenAPI description of the addresses.

use serde_json::{Map, Value, json};

use crate::body::Json;

/// The description of an address.
struct Operation {
    path: &'static str,
    method: &'static str,
    summary: &'static str,
    /// The fields of the body, each with a schema.
    fields: fn() -> Value,
    required: &'static [&'static str],
    /// Whether the answer can be a stream of events.
    streams: bool,
}

const OPERATIONS: &[Operation] = &[
    Operation {
        fields: chat_fields,
        required: &["messages"],
        streams: true,
        ..post(
            "/v1/chat/completions",
            "Generate the next message of a conversation (OpenAI Chat Completions)",
        )
    },
    Operation {
        fields: completion_fields,
        required: &["prompt"],
        streams: true,
        ..post("/v1/completions", "Continue a text without a chat template (OpenAI Completions)")
    },
    Operation {
        fields: response_fields,
        required: &["input"],
        streams: true,
        ..post("/v1/responses", "Generate the next items of a conversation (OpenAI Responses)")
    },
    Operation {
        fields: message_fields,
        required: &["messages", "max_tokens"],
        streams: true,
        ..post("/v1/messages", "Generate the next message of a conversation (Anthropic Messages)")
    },
    Operation {
        fields: message_fields,
        required: &["messages"],
        ..post("/v1/messages/count_tokens", "Count the tokens of a conversation (Anthropic Messages)")
    },
    get("/v1/models", "List the model that is loaded"),
    get("/v1/models/{id}", "Describe a model by its id, which may contain slashes"),
    Operation { fields: text_fields, ..post("/tokenize", "Tokenise a text or a conversation") },
    Operation {
        fields: || json!({ "tokens": tokens() }),
        required: &["tokens"],
        ..post("/detokenize", "Convert tokens to text")
    },
    Operation {
        fields: text_fields,
        required: &["messages"],
        ..post("/apply-template", "Render a conversation with the chat template")
    },
    get("/health", "Report that the process is alive, and its state"),
    get("/ready", "Report whether the server can answer requests"),
    get("/metrics", "Metrics in the Prometheus text format"),
    get("/props", "Describe the model, its context, its limits and its memory"),
    get("/openapi.json", "This document"),
];

const fn get(path: &'static str, summary: &'static str) -> Operation {
    Operation { path, method: "get", summary, fields: no_fields, required: &[], streams: false }
}

const fn post(path: &'static str, summary: &'static str) -> Operation {
    Operation { method: "post", ..get(path, summary) }
}

/// The described addresses.
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
            "description": "Each path that begins with /v1 also exists without this prefix.",
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
        let mut fields = (self.fields)();
        if !fields.is_null() {
            let optional = fields.as_object_mut().into_iter().flatten();
            optional
                .filter(|(name, _)| !self.required.contains(&name.as_str()))
                .for_each(|(_, schema)| allow_null(schema));
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

/// Null means that an optional field is absent.
fn allow_null(schema: &mut Value) {
    match schema.get_mut("type") {
        Some(Value::Array(kinds)) => kinds.push("null".into()),
        Some(kind) => *kind = json!([kind, "null"]),
        None => {
            if let Some(Value::Array(choices)) = schema.get_mut("anyOf") {
                choices.push(json!({ "type": "null" }));
            }
        }
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

/// A number of tokens, or -1 for the rest of the context.
fn limit() -> Value {
    json!({ "anyOf": [{ "type": "integer", "minimum": 1 }, { "const": -1 }] })
}

/// Texts that end an answer.
fn stops() -> Value {
    json!({ "type": "array", "items": { "type": "string", "minLength": 1 }, "maxItems": 16 })
}

fn share() -> Value {
    json!({ "type": "number", "minimum": 0, "maximum": 1 })
}

fn temperature() -> Value {
    json!({ "type": "number", "minimum": 0 })
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

/// Fields that all APIs have under the same name.
fn anywhere_fields() -> Map<String, Value> {
    let integer = json!({ "type": "integer" });
    let penalty = json!({ "type": "number", "minimum": -2, "maximum": 2 });
    let factor = json!({ "type": "number", "exclusiveMinimum": 0 });
    let stop = json!({ "anyOf": [{ "type": "string", "minLength": 1 }, stops()] });
    object(json!({
        "model": { "type": "string" },
        "stream": { "type": "boolean" },
        "temperature": temperature(),
        "top_p": share(),
        "top_k": integer,
        "min_p": share(),
        "repeat_penalty": factor,
        "repetition_penalty": factor,
        "repeat_last_n": integer,
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "logit_bias": { "type": "object", "additionalProperties": { "type": "number" } },
        "seed": integer,
        "stop": stop,
        "ignore_eos": { "type": "boolean" },
        "json_schema": { "type": "object" },
    }))
}

/// Fields about reasoning and the chat template.
fn reasoning_fields() -> Map<String, Value> {
    object(json!({
        "thinking_budget": { "type": "integer" },
        "chat_template_kwargs": { "type": "object" },
    }))
}

/// Fields of chats and completions.
fn common_fields() -> Map<String, Value> {
    let boolean = json!({ "type": "boolean" });
    let mut fields = anywhere_fields();
    fields.extend(object(json!({
        "stream_options": { "type": "object", "properties": { "include_usage": { "type": ["boolean", "null"] } } },
        "return_progress": boolean,
        "n": { "type": "integer", "minimum": 1, "maximum": 128 },
        "max_tokens": limit(),
        "max_completion_tokens": limit(),
        "n_predict": limit(),
        "response_format": { "type": "object" },
    })));
    fields
}

fn object(fields: Value) -> Map<String, Value> {
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
    ] {
        fields.insert(name.into(), schema);
    }
    fields.extend(reasoning_fields());
    fields.into()
}

fn completion_fields() -> Value {
    let mut fields = common_fields();
    for (name, schema) in [
        ("prompt", json!({ "type": ["string", "array"] })),
        ("logprobs", json!({ "type": "integer", "minimum": 0, "maximum": 20 })),
        ("echo", json!({ "type": "boolean" })),
        ("add_special_tokens", json!({ "type": "boolean" })),
    ] {
        fields.insert(name.into(), schema);
    }
    fields.into()
}

fn response_fields() -> Value {
    let any = json!({ "type": "object" });
    let text = json!({ "type": ["string", "null"] });
    let mut fields = anywhere_fields();
    fields.extend(reasoning_fields());
    fields.extend(object(json!({
        "input": { "anyOf": [{ "type": "string" }, { "type": "array", "items": any }] },
        "instructions": { "type": "string" },
        "max_output_tokens": limit(),
        "top_logprobs": { "type": "integer", "minimum": 0, "maximum": 20 },
        "include": { "type": "array", "items": { "type": "string" } },
        "text": { "type": "object", "properties": { "format": { "type": ["object", "null"] }, "verbosity": text } },
        "reasoning": { "type": "object", "properties": { "effort": text, "summary": text } },
        "tools": { "type": "array", "items": any },
        "tool_choice": { "type": ["string", "object"] },
        "parallel_tool_calls": { "type": "boolean" },
        "metadata": any,
    })));
    fields.into()
}

fn message_fields() -> Value {
    let any = json!({ "type": "object" });
    let mut fields = anywhere_fields();
    fields.extend(reasoning_fields());
    fields.extend(object(json!({
        "messages": { "type": "array", "items": { "type": "object", "required": ["role", "content"] } },
        "system": { "anyOf": [{ "type": "string" }, { "type": "array", "items": any }] },
        "max_tokens": { "type": "integer", "minimum": 1 },
        "stop_sequences": stops(),
        "thinking": any,
        "output_config": { "type": "object", "properties": {
            "effort": { "type": ["string", "null"] }, "format": { "type": ["object", "null"] },
        } },
        "tools": { "type": "array", "items": any },
        "tool_choice": any,
    })));
    fields.into()
}
