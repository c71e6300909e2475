//! How likely tokens were, in OpenAI's two shapes.

use forebay_engine::TokenId;
use forebay_engine::generate::sampler::Scored;
use forebay_engine::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// For chats.
pub fn chat(tokenizer: &Tokenizer, scored: &[Scored]) -> Value {
    let entry = |token: TokenId, logprob: f32| {
        let bytes = tokenizer.token_bytes(token);
        json!({ "token": String::from_utf8_lossy(bytes), "logprob": finite(logprob), "bytes": bytes })
    };
    let content = scored.iter().map(|scored| {
        let mut all = entry(scored.token, scored.logprob);
        all["top_logprobs"] = scored.top.iter().map(|&(token, logprob)| entry(token, logprob)).collect();
        all
    });
    json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
}

/// For continuations; `offset` is where the text of the first token begins, in characters, and becomes where the next
/// one's will.
pub fn completions(tokenizer: &Tokenizer, scored: &[Scored], offset: &mut usize) -> Value {
    let text = |token: TokenId| String::from_utf8_lossy(tokenizer.token_bytes(token)).into_owned();
    let mut offsets = Vec::with_capacity(scored.len());
    for scored in scored {
        offsets.push(*offset);
        *offset += text(scored.token).chars().count();
    }
    let top = |scored: &Scored| {
        let mut map: Map<String, Value> =
            scored.top.iter().map(|&(token, logprob)| (text(token), finite(logprob))).collect();
        // The token itself is always among them.
        map.entry(text(scored.token)).or_insert_with(|| finite(scored.logprob));
        Value::Object(map)
    };
    let some = scored.iter().any(|scored| !scored.top.is_empty());
    json!({
        "tokens": scored.iter().map(|scored| text(scored.token)).collect::<Vec<_>>(),
        "token_logprobs": scored.iter().map(|scored| finite(scored.logprob)).collect::<Vec<_>>(),
        "top_logprobs": some.then(|| scored.iter().map(top).collect::<Vec<_>>()),
        "text_offset": offsets,
    })
}

/// JSON has no infinity; OpenAI's stands for it with this.
fn finite(logprob: f32) -> Value {
    json!(if logprob.is_finite() { logprob } else { -9999.0 })
}
