//! Any template either renders or gives an error, in bounded time and memory. Run, from the root of the repository:
//!
//! ```text
//! mkdir -p fuzz/corpus/template && cp tools/chat_templates/* fuzz/corpus/template
//! cargo +nightly fuzz run template -- -max_total_time=120 -timeout=30 -rss_limit_mb=2048
//! ```

#![no_main]

use forebay_engine::chat::{ChatTemplate, Message, RenderOptions};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|source: &str| {
    let Ok(template) = ChatTemplate::new(source, &[("bos_token", "<s>")]) else { return };
    let mut call = Message::new("assistant", "");
    let calls = r#"[{"function": {"name": "f", "arguments": {"a": [1, 2.5, null]}}}]"#;
    call.extra.insert("tool_calls".into(), calls.parse().expect("valid JSON"));
    let messages =
        [Message::new("system", "é"), Message::new("user", "a b\nc"), call, Message::new("tool", "{}")];
    for tools in [vec![], vec![r#"{"function": {"name": "f"}}"#.parse().expect("valid JSON")]] {
        let options = RenderOptions { add_generation_prompt: true, tools, ..RenderOptions::default() };
        let _ = template.render(&messages, &options);
        let _ = template.render(&[], &options);
    }
});
