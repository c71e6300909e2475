//! Logprobs in the two forms of OpenAI's API.

use forebay_engine::TokenId;
use forebay_engine::internals::generate::sampler::Scored;
use forebay_engine::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// The form of chats.
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

/// The form of completions. `offset` is the position of the first token's text, in characters; the function advances it.
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
        // The chosen token is always included.
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

/// JSON has no infinity; OpenAI uses this number instead.
fn finite(logprob: f32) -> Value {
    json!(if logprob.is_finite() { logprob } else { -9999.0 })
}
