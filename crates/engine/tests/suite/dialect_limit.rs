//! Limits on reasoning: a model that would reason for ever must answer.

use forebay_engine::chat::dialect::Dialect;
use forebay_engine::internals::generate::sampler::SamplingParams;
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{Answer, Engine, FinishReason, Grammar, Options, Request};
use serde_json::{Value, json};

use crate::common::dialects::*;
use crate::common::models::demo_model;

/// The demo model, which never ends reasoning on its own.
fn engine() -> Engine {
    Engine::open(&demo_model(), &Options::default().threads(2)).unwrap()
}

/// The answer with at most this many tokens of reasoning.
fn write(engine: &Engine, dialect: &Dialect, prompt: &str, most: Option<usize>, more: Request) -> Answer {
    let limit = |most| dialect.limit(most, prompt, &[], engine.tokenizer()).unwrap();
    let request = more
        .prompt(engine.tokenizer().encode(prompt, EncodeOptions::default()).unwrap())
        .reasoning(most.map(limit))
        .max_tokens(80)
        .sampling(SamplingParams { seed: Some(1), ..SamplingParams::default() })
        .ignore_end(true);
    engine.session().generate(&request, &mut |_| {}).unwrap()
}

/// The number of tokens before those that end reasoning.
fn tokens_before(engine: &Engine, answer: &Answer, end: &str) -> Option<usize> {
    let options = EncodeOptions { special: true, bos: Bos::Never };
    let end = engine.tokenizer().encode(end, options).unwrap();
    answer.tokens.windows(end.len()).position(|window| window == end)
}

#[test]
fn reasoning_ends_at_its_limit() {
    let engine = engine();
    let thinks = format!("{HERMES}<think>");
    let harmony = "<|start|>assistant<|channel|>analysis<|message|>";
    for (template, prompt, end) in [
        (thinks.as_str(), "Once upon a time<think>\n", "\n</think>\n\n"),
        (HARMONY, harmony, "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ] {
        let dialect = Dialect::of(template);
        let parts = |answer: &Answer| parse(dialect.parser(prompt, &[]), [answer.text.as_str()]);
        let endless = write(&engine, &dialect, prompt, None, Request::default());
        assert!(matches!(&parts(&endless)[..], [Part::Reasoning(_)]), "{:?}", endless.text);
        for most in [0, 1, 9] {
            let answer = write(&engine, &dialect, prompt, Some(most), Request::default());
            assert_eq!(tokens_before(&engine, &answer, end), Some(most), "{:?}", answer.text);
            // The tokens before are the same as without a limit.
            assert_eq!(answer.tokens[..most], endless.tokens[..most]);
            match &parts(&answer)[..] {
                [Part::Content(_)] if most == 0 => {}
                [Part::Reasoning(_), Part::Content(_)] => {}
                other => panic!("{most}: {other:?}"),
            }
        }
        // A limit that is not reached changes nothing.
        let answer = write(&engine, &dialect, prompt, Some(1000), Request::default());
        assert_eq!(answer.tokens, endless.tokens);
    }
}

#[test]
fn content_is_not_limited() {
    let engine = engine();
    let dialect = Dialect::of(HERMES);
    let endless = write(&engine, &dialect, "Once upon a time", None, Request::default());
    let limited = write(&engine, &dialect, "Once upon a time", Some(0), Request::default());
    assert_eq!(limited.tokens, endless.tokens);
}

#[test]
fn after_the_limit_the_answer_follows_its_grammar() {
    let engine = engine();
    let prompt = "Once upon a time<think>\n";
    let dialect = Dialect::of(&format!("{HERMES}<think>"));
    let schema = json!({ "type": "object", "properties": { "ok": { "type": "boolean" } }, "required": ["ok"],
        "additionalProperties": false });
    let grammar = Grammar::lark(&engine, &dialect.answer_grammar(prompt, &schema, &[])).unwrap();
    let held =
        |most| write(&engine, &dialect, prompt, most, Request::default().grammar(Some(grammar.clone())));
    assert_eq!(held(None).finish_reason, FinishReason::Length, "it reasons for ever");
    let answer = held(Some(5));
    assert_eq!(answer.finish_reason, FinishReason::Stop, "{:?}", answer.text);
    let parts = parse(dialect.parser(prompt, &[]), [answer.text.as_str()]);
    let [Part::Reasoning(_), Part::Content(json)] = &parts[..] else { panic!("{parts:?}") };
    assert!(serde_json::from_str::<Value>(json).unwrap()["ok"].is_boolean(), "{json}");
}

#[test]
fn tokens_that_a_grammar_forbids_are_not_forced() {
    let engine = engine();
    let prompt = "<|start|>assistant<|channel|>analysis<|message|>";
    let request = Request::default().grammar(Some(Grammar::lark(&engine, r#"start: "yes" | "no""#).unwrap()));
    let answer = write(&engine, &Dialect::of(HARMONY), prompt, Some(0), request);
    assert!(["yes", "no"].contains(&answer.text.as_str()), "{:?}", answer.text);
}
