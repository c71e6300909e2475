//! Chat templates render the same text as jinja2 in transformers.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay_engine::chat::{ChatTemplate, Message, RenderOptions};
use forebay_testing::vectors;
use serde::Deserialize;
use serde_json::{Map, Value as Json};

#[derive(Deserialize)]
struct Vectors {
    conversations: BTreeMap<String, Vec<Message>>,
    settings: Vec<Map<String, Json>>,
    templates: Vec<Template>,
}

#[derive(Deserialize)]
struct Template {
    name: String,
    source: String,
    results: Vec<Rendering>,
}

#[derive(Deserialize)]
struct Rendering {
    conversation: String,
    settings: usize,
    /// Absent if the template refuses the conversation.
    text: Option<String>,
}

/// The time that the vectors were made with.
fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_721_999_109)
}

fn options(settings: &Map<String, Json>) -> RenderOptions {
    let mut kwargs = settings.clone();
    let tools = kwargs.remove("tools").map_or(vec![], |tools| tools.as_array().unwrap().clone());
    let add_generation_prompt = kwargs.remove("add_generation_prompt").unwrap().as_bool().unwrap();
    RenderOptions { add_generation_prompt, tools, kwargs, now: Some(now()) }
}

fn check(data: &str) {
    let data: Vectors = serde_json::from_str(data).unwrap();
    let mut wrong = Vec::new();
    let mut seen = 0;
    for template in &data.templates {
        let compiled = ChatTemplate::new(&template.source, &[("bos_token", "<s>"), ("eos_token", "</s>")]);
        let compiled = compiled.unwrap_or_else(|e| panic!("{}: {e}", template.name));
        for result in &template.results {
            let messages = &data.conversations[&result.conversation];
            let rendered = compiled.render(messages, &options(&data.settings[result.settings]));
            seen += 1;
            let same = match (&rendered, &result.text) {
                (Ok(text), Some(expected)) => text == expected,
                (Err(_), None) => true,
                _ => false,
            };
            if !same {
                wrong.push(format!(
                    "{}, {}, settings {}:\n  is   {rendered:?}\n  must {:?}",
                    template.name, result.conversation, result.settings, result.text
                ));
            }
        }
    }
    assert!(seen > 100);
    assert!(
        wrong.is_empty(),
        "{} of {seen} differ:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(12)].join("\n")
    );
}

#[test]
fn our_templates_render_as_in_transformers() {
    check(include_str!("../data/chat_vectors.json"));
}

/// Compares with published templates, whose vectors `tools/template_vectors.py` writes.
#[test]
fn published_templates_render_as_in_transformers() {
    let Some(path) = vectors("FOREBAY_CHAT_VECTORS", "template_vectors.py") else { return };
    check(&std::fs::read_to_string(path).unwrap());
}
