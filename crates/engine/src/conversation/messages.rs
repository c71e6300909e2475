//! Converts a caller's messages to the form that chat templates expect.

use serde_json::Value;

use crate::chat::Message;
use crate::error::{Error, Result};

/// Converts content to text, call arguments to objects, and the role `developer` to one that the template knows.
///
/// # Errors
/// If a message has content that is not text.
pub(super) fn normalise(messages: &[Message], knows_developer: bool) -> Result<Vec<Message>> {
    let mut all = Vec::with_capacity(messages.len());
    for (i, message) in messages.iter().enumerate() {
        let mut message = message.clone();
        if let Some(content) = message.content.take() {
            message.content = Some(text_of(content, &format!("messages[{i}].content"))?);
        }
        if message.role == "developer" && !knows_developer {
            message.role = "system".into();
        }
        for call in message.extra.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(arguments) = call.get_mut("function").and_then(|f| f.get_mut("arguments")) {
                arguments_as_object(arguments);
            }
        }
        all.push(message);
    }
    Ok(all)
}

/// Converts call arguments to text, for templates that print them unchanged.
pub(super) fn with_textual_arguments(messages: &[Message]) -> Vec<Message> {
    let mut messages = messages.to_vec();
    for message in &mut messages {
        for call in message.extra.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(arguments @ (Value::Object(_) | Value::Array(_))) =
                call.get_mut("function").and_then(|f| f.get_mut("arguments"))
            {
                *arguments = arguments.to_string().into();
            }
        }
    }
    messages
}

/// Parses arguments that are JSON text, because templates iterate over them. Text that is not JSON stays text.
fn arguments_as_object(arguments: &mut Value) {
    if let Value::String(text) = arguments {
        if text.trim().is_empty() {
            *arguments = Value::Object(Default::default());
        } else if let Ok(value @ Value::Object(_)) = serde_json::from_str(text) {
            *arguments = value;
        }
    }
}

/// The content of a message as one text, if it comes in parts. Null stays null; `place` names the content in errors.
///
/// # Errors
/// If a part is not text.
///
/// # Examples
/// ```
/// use forebay_engine::conversation::text_of;
/// use serde_json::json;
///
/// let parts = json!([{ "type": "text", "text": "Look:" }, { "type": "text", "text": "a cat" }]);
/// assert_eq!(text_of(parts, "messages[0].content")?, "Look:\na cat");
///
/// let image = json!([{ "type": "image_url", "image_url": {} }]);
/// assert!(text_of(image, "messages[0].content").is_err());
/// # Ok::<(), forebay_engine::Error>(())
/// ```
pub fn text_of(content: Value, place: &str) -> Result<Value> {
    let parts = match content {
        Value::Array(parts) => parts,
        Value::String(_) | Value::Null => return Ok(content),
        _ => return Err(Error::field(place, "content must be a string or a list of parts")),
    };
    let mut texts = Vec::with_capacity(parts.len());
    for part in parts {
        let kind = part.get("type").and_then(Value::as_str);
        let text = match (&part, kind) {
            (Value::String(text), _) => Some(text.as_str()),
            (_, Some("text" | "input_text" | "output_text") | None) => {
                part.get("text").and_then(Value::as_str)
            }
            (_, Some("refusal")) => part.get("refusal").and_then(Value::as_str),
            (_, Some(other)) => {
                let what = other.trim_start_matches("input_").trim_end_matches("_url");
                let message =
                    format!("this model reads text; a part of type {other} ({what}) is not supported");
                return Err(Error::field(place, message));
            }
        };
        match text {
            Some(text) => texts.push(text.to_owned()),
            None => return Err(Error::field(place, "a part of the content has no text")),
        }
    }
    Ok(texts.join("\n").into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn messages(value: Value) -> Vec<Message> {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn content_in_parts_becomes_text() {
        let given = messages(json!([
            { "role": "developer", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] },
            { "role": "assistant", "content": null },
        ]));
        let normal = normalise(&given, false).unwrap();
        assert_eq!((normal[0].role.as_str(), &normal[0].content), ("system", &Some(json!("a\nb"))));
        assert_eq!(normal[1].content, Some(Value::Null));
        assert_eq!(normalise(&given, true).unwrap()[0].role, "developer");
    }

    #[test]
    fn what_is_not_text_is_refused_with_its_place() {
        for part in [
            json!({ "type": "image_url", "image_url": { "url": "data:" } }),
            json!({ "type": "input_audio", "input_audio": {} }),
            json!({ "type": "text" }),
            json!(7),
        ] {
            let given =
                messages(json!([{ "role": "user", "content": "x" }, { "role": "user", "content": [part] }]));
            let error = normalise(&given, false).unwrap_err();
            assert!(
                matches!(&error, Error::Field { field, .. } if field == "messages[1].content"),
                "{error:?}"
            );
        }
        assert!(normalise(&messages(json!([{ "role": "user", "content": 7 }])), false).is_err());
    }

    #[test]
    fn arguments_are_objects_for_templates_and_text_for_the_others() {
        let call =
            |arguments: &str| json!({ "id": "1", "function": { "name": "f", "arguments": arguments } });
        let given = messages(json!([{
            "role": "assistant", "tool_calls": [call("{\"b\": 1, \"a\": 2}"), call("not json"), call("")],
        }]));
        let normal = normalise(&given, false).unwrap();
        let arguments = |m: &Message, i: usize| m.extra["tool_calls"][i]["function"]["arguments"].clone();
        assert_eq!(arguments(&normal[0], 0).to_string(), r#"{"b":1,"a":2}"#);
        assert_eq!(arguments(&normal[0], 1), "not json");
        assert_eq!(arguments(&normal[0], 2), json!({}));
        let textual = with_textual_arguments(&normal);
        assert_eq!(arguments(&textual[0], 0), r#"{"b":1,"a":2}"#);
    }
}
