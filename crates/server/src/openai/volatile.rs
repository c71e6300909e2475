//! Lines of system prompts that differ in each request.

use forebay_engine::Result;
use forebay_engine::chat::Message;
use forebay_engine::conversation::text_of;
use serde_json::Value;

/// Beginnings of lines that some clients write into the system prompt and that differ in each request. They mean nothing to the
/// model, and with them two prompts would share no beginning.
const VOLATILE: [&str; 1] = ["x-anthropic-billing-header:"];

/// Removes such lines from a conversation.
///
/// # Errors
/// If the content of a system message is not text.
pub fn drop_volatile_lines(messages: &mut [Message]) -> Result<()> {
    for (i, message) in messages.iter_mut().enumerate() {
        if !matches!(message.role.as_str(), "system" | "developer") {
            continue;
        }
        let Some(content) = message.content.take() else { continue };
        let mut content = text_of(content, &format!("messages[{i}].content"))?;
        if let Value::String(text) = &mut content {
            drop_lines(text);
        }
        message.content = Some(content);
    }
    Ok(())
}

fn drop_lines(text: &mut String) {
    let is_volatile = |line: &str| VOLATILE.iter().any(|start| line.trim_start().starts_with(start));
    if text.lines().any(is_volatile) {
        *text = text.split_inclusive('\n').filter(|line| !is_volatile(line)).collect();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_that_change_with_every_request_are_dropped_from_instructions() {
        let text = "x-anthropic-billing-header: cc_version=2; cch=1f;\nYou are helpful.\n";
        let mut messages: Vec<Message> = serde_json::from_value(json!([
            { "role": "system", "content": text },
            { "role": "developer", "content": [{ "type": "text", "text": VOLATILE[0] }, { "type": "text", "text": "Be brief." }] },
            { "role": "user", "content": text },
            { "role": "system" },
        ]))
        .unwrap();
        drop_volatile_lines(&mut messages).unwrap();
        let contents: Vec<_> = messages.iter().map(|message| message.content.clone()).collect();
        let expected = [json!("You are helpful.\n"), json!("Be brief."), json!(text)];
        assert_eq!(contents, [&expected.map(Some)[..], &[None]].concat());
        let mut wrong: Vec<Message> =
            serde_json::from_value(json!([{ "role": "system", "content": [{ "type": "image_url" }] }]))
                .unwrap();
        assert!(drop_volatile_lines(&mut wrong).is_err());
    }
}
