//! `trace` and `simulate`: recorded routing, and what caches would have made of it.

use std::path::Path;

use serde_json::Value;

use crate::common::{call, demo_model, golden, text};

/// Records an answer of 40 tokens; the last of them is never computed with, so 39 are routed.
fn record(folder: &Path, seed: &str) -> String {
    let out = text(&folder.join(format!("{seed}.trace")));
    let prompt = "Tell me a story about a cat and a boat.";
    let model = demo_model();
    let line =
        call(&["trace", &model, "-p", prompt, "-n", "40", "--ignore-eos", "--seed", seed, "--out", &out])
            .success();
    assert_eq!(line, format!("{out}: expert use of 22 prompt tokens and 39 generated tokens\n"));
    out
}

fn simulate(args: &[&str]) -> Value {
    serde_json::from_str(&call(&[&["simulate", "--json"], args].concat()).success()).unwrap()
}

fn rate(budget: &Value, column: &str) -> f64 {
    budget["hit_rate"][column].as_f64().unwrap_or_else(|| panic!("no {column} in {budget}"))
}

#[test]
fn a_recorded_conversation_is_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let trace = record(folder.path(), "1");
    let object = simulate(&[&trace, "--slots", "10,20,50,100"]);
    assert_eq!((&object["experts"], &object["experts_per_token"]), (&128.into(), &32.into()));
    assert_eq!((&object["prompt_tokens"], &object["answer_tokens"]), (&22.into(), &39.into()));
    let budgets = object["budgets"].as_array().unwrap();
    assert_eq!(budgets.iter().map(|b| b["slots"].as_u64().unwrap()).collect::<Vec<_>>(), [13, 26, 64, 128]);
    for budget in &budgets[..3] {
        for policy in ["lru", "lfu", "forecast"] {
            assert!(rate(budget, policy) <= rate(budget, "belady"), "{budget}");
        }
        assert!(rate(budget, "forecast") > rate(budget, "lru"), "{budget}");
    }
    // A token uses 32 experts: with fewer slots, the least recently used one is the next one needed, always. Only the
    // first token finds something, which the prompt left.
    assert!(budgets[..2].iter().all(|b| rate(b, "lru") < 0.02), "{object}");
    let share = |budget: &Value| budget["slots"].as_f64().unwrap() / 128.0;
    assert!(budgets[..2].iter().all(|b| rate(b, "forecast") >= 0.8 * share(b)), "{object}");
    assert_eq!(rate(&budgets[3], "fixed"), 1.0);

    // For people the same figures, rounded.
    let table = call(&["simulate", &trace, "--slots", "50"]).success();
    assert!(
        table.starts_with(
            "128 experts (14.5 MiB), 32 used per token; 22 prompt tokens, 39 generated tokens.\n"
        ),
        "{table}"
    );
    let cell = format!("| {:>7.1} % |", rate(&budgets[2], "belady") * 100.0);
    assert!(table.lines().last().is_some_and(|line| line.ends_with(&cell)), "{table}");
}

#[test]
fn conversations_follow_each_other_in_one_cache() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (record(folder.path(), "1"), record(folder.path(), "2"));
    assert_ne!(std::fs::read(&one).unwrap(), std::fs::read(&two).unwrap());
    let object = simulate(&[&one, &two]);
    assert_eq!((&object["prompt_tokens"], &object["answer_tokens"]), (&44.into(), &78.into()));
    assert_eq!(object["budgets"].as_array().unwrap().len(), 5);

    let other = text(&folder.path().join("other.trace"));
    let tiny = golden("qwen3moe.gguf");
    call(&["trace", &tiny, "--raw", "-p", "Hello", "-n", "3", "--ignore-eos", "--out", &other]).success();
    let error = call(&["simulate", &one, &other]).failure(1);
    assert!(error.ends_with("are traces of different models; simulate them separately"), "{error}");
}

#[test]
fn a_trace_does_not_depend_on_threads() {
    let folder = tempfile::tempdir().unwrap();
    let record = |threads: &str| {
        let out = text(&folder.path().join(threads));
        let model = demo_model();
        let args =
            ["trace", &model, "-p", "A cat.", "-n", "5", "--temp", "0", "--threads", threads, "--out", &out];
        call(&args).success();
        std::fs::read(out).unwrap()
    };
    assert_eq!(record("1"), record("3"));
}

#[test]
fn what_is_no_trace_is_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let trace = record(folder.path(), "1");
    let bytes = std::fs::read(&trace).unwrap();
    let damaged = text(&folder.path().join("damaged"));
    let refuse = |bytes: &[u8]| {
        std::fs::write(&damaged, bytes).unwrap();
        call(&["simulate", &damaged]).failure(1)
    };
    assert!(refuse(&bytes[..bytes.len() - 1]).contains("its checksum does not match"));
    assert!(refuse(b"").contains("is not a routing trace"));
    assert!(call(&["simulate", &demo_model()]).failure(1).contains("is not a routing trace"));
    assert!(call(&["simulate", "nothing.trace"]).failure(1).contains("cannot read"));
    for slots in ["0", "101", "many"] {
        let outcome = call(&["simulate", &trace, "--slots", slots]);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{slots}");
    }
    assert_eq!(call(&["trace", &demo_model(), "--out", &damaged]).code, Some(2));
}

#[test]
fn an_answer_of_one_token_routes_nothing_that_could_hit() {
    let folder = tempfile::tempdir().unwrap();
    let out = text(&folder.path().join("short"));
    call(&["trace", &demo_model(), "-p", "A cat.", "-n", "1", "--out", &out]).success();
    let error = call(&["simulate", &out]).failure(1);
    assert!(error.contains("no generated tokens"), "{error}");
}
