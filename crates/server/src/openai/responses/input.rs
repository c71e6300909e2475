//! Converts the items of a conversation to the messages that templates expect.

use std::collections::HashMap;

use forebay_engine::chat::Message;
use forebay_engine::conversation::text_of;
use serde_json::{Value, json};

use super::output::PLAIN;
use super::tools::Name;
use crate::error::ApiError;

/// The messages of a conversation. Consecutive items of the assistant (reasoning, text, calls) become one message.
pub fn messages(instructions: Option<&str>, input: Option<&Value>) -> Result<Vec<Message>, ApiError> {
    let mut conversation = Conversation::default();
    if let Some(instructions) = instructions {
        conversation.messages.push(Message::new("system", instructions));
    }
    match input {
        None | Some(Value::Null) => return Err(ApiError::invalid("input", "the field input is missing")),
        Some(Value::String(text)) => conversation.messages.push(Message::new("user", text.as_str())),
        Some(Value::Array(items)) => {
            for (i, item) in items.iter().enumerate() {
                conversation.take(&format!("input[{i}]"), item)?;
            }
        }
        Some(_) => return Err(ApiError::invalid("input", "it must be a text or a list of items")),
    }
    Ok(conversation.messages)
}

#[derive(Default)]
struct Conversation {
    messages: Vec<Message>,
    /// The names of called functions, by the ids of the calls.
    called: HashMap<String, String>,
}

impl Conversation {
    fn take(&mut self, place: &str, item: &Value) -> Result<(), ApiError> {
        let text = |name: &str| item.get(name).and_then(Value::as_str);
        let field = |name: &str| {
            text(name).ok_or_else(|| {
                ApiError::invalid(format!("{place}.{name}"), format!("the field {name} is missing"))
            })
        };
        match text("type").unwrap_or("message") {
            "message" => {
                let role = field("role")?;
                let content = item.get("content").cloned().unwrap_or_default();
                let content = text_of(content, &format!("{place}.content"))?;
                let content = content.as_str().unwrap_or_default();
                if role == "assistant" {
                    // Earlier text is not copied; otherwise the time would grow with the square of the number of items.
                    match &mut self.assistant().content {
                        Some(Value::String(said)) => said.push_str(content),
                        other => *other = Some(content.into()),
                    }
                } else {
                    self.messages.push(Message::new(role, content));
                }
            }
            "reasoning" => {
                let thought = thought(item);
                if !thought.is_empty() {
                    self.assistant().extra.insert("reasoning_content".into(), thought.into());
                }
            }
            "function_call" => {
                let (id, name, arguments) = (field("call_id")?, field("name")?, field("arguments")?);
                let name = Name::new(text("namespace"), name).for_model();
                self.called.insert(id.to_owned(), name.clone());
                let call = json!({
                    "id": id, "type": "function", "function": { "name": name, "arguments": arguments },
                });
                let calls = self.assistant().extra.entry("tool_calls").or_insert_with(|| json!([]));
                if let Some(calls) = calls.as_array_mut() {
                    calls.push(call);
                }
            }
            "function_call_output" => {
                let id = field("call_id")?;
                let output = item.get("output").cloned().unwrap_or_default();
                let output = text_of(output, &format!("{place}.output"))?;
                let mut message = Message::new("tool", output.as_str().unwrap_or_default());
                message.extra.insert("tool_call_id".into(), id.into());
                if let Some(name) = self.called.get(id) {
                    message.extra.insert("name".into(), name.as_str().into());
                }
                self.messages.push(message);
            }
            "item_reference" => {
                let message = "this server stores no items: send the item itself";
                return Err(ApiError::invalid(place, message));
            }
            other => {
                let message = format!("items of type {other} are not supported");
                return Err(ApiError::invalid(format!("{place}.type"), message));
            }
        }
        Ok(())
    }

    /// The open message of the assistant.
    fn assistant(&mut self) -> &mut Message {
        if self.messages.last().is_none_or(|message| message.role != "assistant") {
            self.messages.push(Message::new("assistant", ""));
        }
        self.messages.last_mut().expect("there is one")
    }
}

/// The text of reasoning, in any form that clients send back.
fn thought(item: &Value) -> String {
    let texts = |field: &str| -> String {
        let parts = item.get(field).and_then(Value::as_array).into_iter().flatten();
        parts.filter_map(|part| part.get("text").and_then(Value::as_str)).collect()
    };
    let content = texts("content");
    if !content.is_empty() {
        return content;
    }
    let carried =
        item.get("encrypted_content").and_then(Value::as_str).and_then(|text| text.strip_prefix(PLAIN));
    carried.map_or_else(|| texts("summary"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_become_messages() {
        let input = json!([
            { "role": "user", "content": [{ "type": "input_text", "text": "Weather?" }] },
            { "type": "reasoning", "id": "rs_1", "summary": [], "content": [{ "type": "reasoning_text", "text": "Hm." }] },
            { "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": "I look." }] },
            { "type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{\"city\": \"Oslo\"}" },
            { "type": "function_call", "call_id": "c2", "namespace": "mcp__clock", "name": "time", "arguments": "{}" },
            { "type": "function_call_output", "call_id": "c1", "output": "rain" },
            { "type": "function_call_output", "call_id": "c2", "output": [{ "type": "input_text", "text": "noon" }] },
            { "role": "developer", "content": "Hurry." },
        ]);
        let messages = serde_json::to_value(messages(Some("Be brief."), Some(&input)).unwrap()).unwrap();
        let call = |id: &str, name: &str, arguments: &str| json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
        assert_eq!(
            messages,
            json!([
                { "role": "system", "content": "Be brief." },
                { "role": "user", "content": "Weather?" },
                { "role": "assistant", "content": "I look.", "reasoning_content": "Hm.",
                  "tool_calls": [call("c1", "weather", "{\"city\": \"Oslo\"}"), call("c2", "mcp__clock__time", "{}")] },
                { "role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather" },
                { "role": "tool", "content": "noon", "tool_call_id": "c2", "name": "mcp__clock__time" },
                { "role": "developer", "content": "Hurry." },
            ])
        );
    }

    #[test]
    fn reasoning_comes_back_in_whichever_form_it_was_kept() {
        let content =
            json!({ "content": [{ "text": "a" }], "encrypted_content": format!("{PLAIN}b"), "summary": [] });
        assert_eq!(thought(&content), "a");
        assert_eq!(
            thought(&json!({ "encrypted_content": format!("{PLAIN}b"), "summary": [{ "text": "c" }] })),
            "b"
        );
        assert_eq!(
            thought(&json!({ "encrypted_content": "someone else's", "summary": [{ "text": "c" }] })),
            "c"
        );
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (input, param) in [
            (json!(null), "input"),
            (json!(7), "input"),
            (json!([{ "type": "item_reference", "id": "x" }]), "input[0]"),
            (json!([{ "type": "computer_call" }]), "input[0].type"),
            (json!([{ "type": "function_call", "call_id": "x", "name": "f" }]), "input[0].arguments"),
            (json!([{ "type": "function_call_output", "output": "x" }]), "input[0].call_id"),
            (json!([{ "content": "x" }]), "input[0].role"),
            (json!([{ "role": "user", "content": [{ "type": "input_image" }] }]), "input[0].content"),
        ] {
            let error = messages(None, Some(&input)).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{input}");
        }
    }
}
