//! Grammars that make a model call tools, and tags that are control tokens.

use std::path::Path;

use forebay_engine::chat::dialect::Dialect;
use forebay_engine::internals::format::{Metadata, NumberArray, NumberKind, StringArray, Value as Setting};
use forebay_engine::internals::generate::sampler::SamplingParams;
use forebay_engine::tokenizer::{EncodeOptions, Tokenizer};
use forebay_engine::{Engine, FinishReason, Grammar, Options, Request, TokenId};
use serde_json::{Value, json};

use crate::common::dialects::*;
use crate::common::models::demo_model;

fn tools() -> Vec<Value> {
    vec![json!({ "type": "function", "function": { "name": "now" } })]
}

/// A tokenizer of these control tokens and `a`.
fn tokenizer(controls: &[&str]) -> Tokenizer {
    let (mut tokens, mut types) = (StringArray::default(), Vec::new());
    for (text, kind) in [("a", 1i32)].into_iter().chain(controls.iter().map(|text| (*text, 3))) {
        tokens.push(text);
        types.extend(kind.to_le_bytes());
    }
    let mut metadata = Metadata::default();
    let mut set = |key: &str, value| metadata.insert(format!("tokenizer.ggml.{key}"), value).unwrap();
    set("model", Setting::String("gpt2".into()));
    set("pre", Setting::String("gpt-2".into()));
    set("tokens", Setting::Strings(tokens));
    set("merges", Setting::Strings(StringArray::default()));
    set("token_type", Setting::Numbers(NumberArray::new(NumberKind::I32, types)));
    Tokenizer::from_metadata(Path::new("model.gguf"), &metadata).unwrap()
}

#[test]
fn control_tokens_that_are_tags_are_shown_and_numbered() {
    let tokenizer = tokenizer(&["<|channel|>", "<|message|>", "<|im_start|>"]);
    let harmony = Dialect::of(HARMONY).with_tokens(&tokenizer);
    assert_eq!(harmony.shown(&[]), [TokenId(1), TokenId(2)]);
    let grammar = harmony.call_grammar("<|start|>assistant", &tools()).unwrap();
    assert!(
        grammar.contains(r#"<[1]> "commentary to=functions.now " "<|constrain|>" "json" <[2]> "{}""#),
        "{grammar}"
    );
    // In other formats, tags of calls are text unless there are tools.
    let tokenizer = self::tokenizer(&["<|tool_call_begin|>", "</think>"]);
    let kimi = Dialect::of(KIMI).with_tokens(&tokenizer);
    assert_eq!(kimi.shown(&[]), [TokenId(2)]);
    assert_eq!(kimi.shown(&tools()).len(), 2);
    // Line breaks are part of a token, or follow it. The end of a message is not text, with or without tools.
    for (controls, call) in [
        (["<|message_sep|>\n\n", "<|role_sep|>\n"], r#"<[1]> "function call" <[2]> "{"#),
        (["<|message_sep|>", "<|role_sep|>"], r#"<[1]> "\n\n" "function call" <[2]> "\n" "{"#),
    ] {
        let dialect = Dialect::of(GIGACHAT3).with_tokens(&self::tokenizer(&controls));
        assert_eq!(dialect.shown(&[]), [TokenId(1)]);
        assert_eq!(dialect.shown(&tools()).len(), 2);
        let grammar = dialect.call_grammar("", &tools()).unwrap();
        assert!(grammar.contains(call), "{grammar}");
    }
    // The tag of Gemma's reasoning is a token and a word.
    let tokenizer = self::tokenizer(&["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|\"|>"]);
    let gemma = Dialect::of(&format!("<|channel>thought{GEMMA4}")).with_tokens(&tokenizer);
    assert_eq!(gemma.shown(&[]).len(), 2);
    assert_eq!(gemma.shown(&tools()).len(), 5);
    let grammar = gemma.call_grammar("<|turn>model\n", &tools()).unwrap();
    assert!(grammar.contains(r#"<[1]> "thought" "#), "{grammar}");
    assert!(grammar.contains(r#"<[3]> "call:now" "{" ("}") <[4]>"#), "{grammar}");
    // Tags around an answer are not text.
    let tokenizer = self::tokenizer(&["<|START_TEXT|>", "<|START_ACTION|>", "<response>"]);
    let cohere = Dialect::of(COHERE).with_tokens(&tokenizer);
    assert_eq!(cohere.shown(&[]), [TokenId(1)]);
    assert_eq!(cohere.shown(&tools()), [TokenId(2), TokenId(1)]);
    assert_eq!(Dialect::of(ERNIE).with_tokens(&tokenizer).shown(&[]), [TokenId(3)]);
    // A call's tags are tokens too.
    let tokenizer = self::tokenizer(&["<tool_calls:opensource>", "<tool_sep:opensource>"]);
    let grammar = Dialect::of(HY3).with_tokens(&tokenizer).call_grammar("", &tools()).unwrap();
    assert!(grammar.contains(r#"<[1]> "\n" "<tool_call:opensource>" "now" <[2]> "\n""#), "{grammar}");
    let tokenizer = self::tokenizer(&["<|begin|>", "<|content|>", "<|tool_calls|>", "<|end|>"]);
    let solar = Dialect::of(SOLAR).with_tokens(&tokenizer);
    assert_eq!(solar.shown(&[]).len(), 3);
    assert_eq!(solar.shown(&tools()).len(), 4);
}

#[test]
fn grammars_allow_reasoning_if_the_prompt_does() {
    let thinks = format!("{HERMES}<think>");
    let grammar =
        |template: &str, prompt: &str| Dialect::of(template).answer_grammar(prompt, &json!({}), &[]);
    let start = |template: &str, prompt: &str| grammar(template, prompt).lines().next().unwrap().to_owned();
    assert_eq!(start(HERMES, ""), "start: r0");
    assert_eq!(start(&thinks, "<think>\n"), r"start: r0 /\n{0,2}/  r1");
    assert_eq!(start(&thinks, ""), r"start: /\n{0,2}/ r1? /\n{0,2}/  r2");
    assert_eq!(start(&thinks, "<think>\n\n</think>\n\n"), r"start: /\n{0,2}/  r0");
    assert!(start(HARMONY, "<|start|>assistant").starts_with("start: r1? \"<|channel|>\" \"final\""));
    assert_eq!(start(HARMONY, "<|start|>assistant<|channel|>final<|message|>"), "start: r0");
}

#[test]
fn a_call_in_an_unknown_format_cannot_be_required() {
    let refused = |template: &str, tools: &[Value]| {
        Dialect::of(template).call_grammar("", tools).unwrap_err().to_string()
    };
    assert!(refused(NONE, &tools()).contains("does not show how it calls tools"));
    assert!(refused(HERMES, &[]).contains("no tools"));
}

/// The demo model was not trained on tools: only the grammar makes it call them.
#[test]
fn a_forced_model_calls() {
    let options = Options::default().threads(2);
    let engine = Engine::open(&demo_model(), &options).unwrap();
    let prompt = engine.tokenizer().encode("Once upon a time", EncodeOptions::default()).unwrap();
    let parameters = json!({
        "type": "object",
        "properties": {
            "count": { "type": "integer", "minimum": 1, "maximum": 99 },
            "kind": { "enum": ["cat", "small dog"] },
            "spotted": { "type": "boolean" },
            "ages": { "type": "array", "items": { "$ref": "#/$defs/age" }, "maxItems": 2 },
        },
        "required": ["count", "kind", "ages"],
        "$defs": { "age": { "type": "integer", "minimum": 0, "maximum": 9 } },
    });
    let tools = [
        json!({ "type": "function", "function": { "name": "find_animal", "parameters": parameters } }),
        json!({ "type": "function", "function": { "name": "sleep" } }),
    ];
    let write_at = |temperature, source: &str, seed| {
        let sampling = SamplingParams { seed: Some(seed), temperature, ..SamplingParams::default() };
        let grammar = Some(Grammar::lark(&engine, source).unwrap());
        let request =
            Request::default().prompt(prompt.clone()).sampling(sampling).grammar(grammar).max_tokens(600);
        let answer = engine.session().generate(&request, &mut |_| {}).unwrap();
        (answer.text, answer.finish_reason)
    };
    let write = |source: &str, seed| write_at(SamplingParams::default().temperature, source, seed);
    let mut found = 0;
    for template in ALL.into_iter().filter(|template| *template != NONE) {
        let dialect = Dialect::of(template);
        // This model would never end reasoning.
        let prompt = if template == HARMONY { "<|message|>" } else { "" };
        for (i, tools) in [&tools[..], &tools[..1], &tools[1..]].into_iter().enumerate() {
            let (text, end) = write(&dialect.call_grammar(prompt, tools).unwrap(), i as u64);
            assert_eq!(end, FinishReason::Stop, "{text}");
            let parser_prompt = if template == HARMONY { "<|start|>assistant" } else { "" };
            let parts = parse(dialect.parser(parser_prompt, tools), [text.as_str()]);
            let [Part::Call(name, arguments)] = &parts[..] else { panic!("{text}: {parts:?}") };
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            if name == "sleep" {
                assert_eq!(arguments, json!({}), "{text}");
                continue;
            }
            assert_eq!(name, "find_animal", "{text}");
            found += 1;
            assert!((1..=99).contains(&arguments["count"].as_i64().unwrap()), "{text}");
            assert!(["cat", "small dog"].contains(&arguments["kind"].as_str().unwrap()), "{text}");
            assert!(
                arguments["ages"].as_array().unwrap().iter().all(|age| age.as_i64().unwrap() < 10),
                "{text}"
            );
        }
        let schema = json!({ "type": "object", "properties": { "ok": { "type": "boolean" } }, "required": ["ok"],
            "additionalProperties": false });
        let (text, _) = write(&dialect.answer_grammar(prompt, &schema, &[]), 1);
        let parser_prompt =
            if template == HARMONY { "<|start|>assistant<|channel|>final<|message|>" } else { "" };
        let parts = parse(dialect.parser(parser_prompt, &[]), [text.as_str()]);
        let [Part::Content(json)] = &parts[..] else { panic!("{}: {text}: {parts:?}", dialect.name()) };
        let value: Value =
            serde_json::from_str(json).unwrap_or_else(|error| panic!("{}: {text}: {error}", dialect.name()));
        assert!(value["ok"].is_boolean(), "{text}");
        // If calls are optional, the random seed decides whether it calls.
        let either = dialect.answer_grammar(prompt, &schema, &tools[1..]);
        let mut said = [0, 0];
        for seed in 0..50 {
            if said[0] > 0 && said[1] > 0 {
                break;
            }
            let (text, end) = write_at(50.0, &either, seed);
            assert_eq!(end, FinishReason::Stop, "{text}");
            let parser_prompt = match template {
                HARMONY if text.starts_with("<|channel|>") => "<|start|>assistant",
                HARMONY => "<|start|>assistant<|channel|>final<|message|>",
                _ => "",
            };
            match &parse(dialect.parser(parser_prompt, &tools), [text.as_str()])[..] {
                [Part::Content(json)] => {
                    assert!(serde_json::from_str::<Value>(json).unwrap()["ok"].is_boolean(), "{text}");
                    said[0] += 1;
                }
                [Part::Call(name, _)] => {
                    assert_eq!(name, "sleep", "{text}");
                    said[1] += 1;
                }
                other => panic!("{text}: {other:?}"),
            }
        }
        assert!(said[0] > 0 && said[1] > 0, "{}: {said:?}", dialect.name());
    }
    assert!(found >= 29, "each dialect calls it at least once");
}
