//! `perplexity`: one number for how well a model predicts a text.

use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;

use crate::common;
use crate::common::{call, demo_model, golden, text, with_bos};

/// A beginning of the kind the demo model was trained on.
const STORY: &str = "Once upon a time there was a small cat who lived by the sea. Every morning the cat went down to \
    the harbour and looked at the boats.";

fn perplexity(file: &Path, more: &[&str]) -> Value {
    let (model, file) = (demo_model(), text(file));
    let args = [&["perplexity", &model, "-f", &file, "--json"], more].concat();
    serde_json::from_str(&call(&args).success()).unwrap()
}

fn number(object: &Value, key: &str) -> f64 {
    object[key].as_f64().unwrap_or_else(|| panic!("{key} is no number in {object}"))
}

fn tokenize(model: &str, words: &str) -> Vec<usize> {
    let ids = call(&["tokenize", model, "--ids", "--no-special", "--text", words]).success();
    serde_json::from_str(&ids).unwrap()
}

/// The surprise at each token after the first, from what `logits` gives.
fn surprises(model: &str, ids: &[usize], folder: &Path) -> Vec<f64> {
    let out = folder.join("logits.safetensors");
    call(&["logits", model, "--tokens", &format!("{ids:?}"), "--out", &text(&out)]).success();
    let bytes = std::fs::read(out).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let data = file.tensor("logits").unwrap().data().to_vec();
    let logits: Vec<f64> =
        data.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect();
    let rows = logits.chunks_exact(logits.len() / ids.len());
    let surprise =
        |(row, &next): (&[f64], &usize)| -> f64 { row.iter().map(|l| l.exp()).sum::<f64>().ln() - row[next] };
    rows.zip(&ids[1..]).map(surprise).collect()
}

#[test]
fn perplexity_is_the_exponential_of_the_mean_surprise() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text");
    std::fs::write(&file, STORY).unwrap();
    let surprises = surprises(&demo_model(), &tokenize(&demo_model(), STORY), folder.path());
    let n = surprises.len() as f64;
    let mean = surprises.iter().sum::<f64>() / n;
    let variance = surprises.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let object = perplexity(&file, &[]);
    assert!((number(&object, "perplexity").ln() - mean).abs() < 1e-6, "{object} {mean}");
    let error = (variance / n).sqrt() * mean.exp();
    assert!((number(&object, "error") / error - 1.0).abs() < 1e-6, "{object} {error}");
    assert_eq!((&object["tokens"], &object["windows"]), (&surprises.len().into(), &1.into()));
    assert_eq!(object["ctx"], 512);
    assert!(number(&object, "seconds") > 0.0);

    // For people the same figures, rounded.
    let line = call(&["perplexity", &demo_model(), "-f", &text(&file)]).success();
    let (value, error) = (number(&object, "perplexity"), number(&object, "error"));
    let [low, high] = [0, 1].map(|end| object["interval"][end].as_f64().unwrap());
    assert!((low * high / value / value - 1.0).abs() < 1e-9 && high > value + 1.9 * error, "{object}");
    let expected = format!(
        "perplexity {value:.4} ± {error:.4} (95 %: {low:.4} to {high:.4}) · {n} tokens in 1 window of 512\n"
    );
    assert_eq!(line, expected);
}

#[test]
fn windows_are_predicted_each_for_itself() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text");
    // Each of these words is one token, and so is each window's text alone.
    let ids = |words: &str| tokenize(&demo_model(), words);
    let (first, second, last) = ("Once upon a time", " there was a little", " girl who");
    let all = [first, second, last].concat();
    assert_eq!([ids(first), ids(second), ids(last)].concat(), ids(&all));
    assert_eq!((ids(first).len(), ids(second).len(), ids(last).len()), (4, 4, 2));
    let parts = [first, second, last].map(|words| surprises(&demo_model(), &ids(words), folder.path()));
    let surprises = parts.concat();
    std::fs::write(&file, &all).unwrap();
    let object = perplexity(&file, &["--ctx", "4"]);
    assert_eq!((&object["tokens"], &object["windows"]), (&7.into(), &3.into()));
    let mean = surprises.iter().sum::<f64>() / 7.0;
    assert!((number(&object, "perplexity").ln() - mean).abs() < 1e-6, "{object} {mean}");

    // A single token that is left over predicts nothing.
    std::fs::write(&file, [first, second, " girl"].concat()).unwrap();
    let object = perplexity(&file, &["--ctx", "4"]);
    assert_eq!((&object["tokens"], &object["windows"]), (&6.into(), &2.into()));
}

#[test]
fn bos_takes_the_place_of_the_first_token_of_each_window() {
    let folder = tempfile::tempdir().unwrap();
    let (model, file) = (text(&folder.path().join("bos.gguf")), text(&folder.path().join("text")));
    std::fs::write(&model, with_bos(&std::fs::read(golden("qwen3moe.gguf")).unwrap())).unwrap();
    std::fs::write(&file, STORY).unwrap();
    let ids = tokenize(&model, STORY);
    let surprises: Vec<f64> = ids
        .chunks(16)
        .filter(|window| window.len() > 1)
        .flat_map(|window| surprises(&model, &[&ids[..1], &window[1..]].concat(), folder.path()))
        .collect();
    let mean = surprises.iter().sum::<f64>() / surprises.len() as f64;
    let object = call(&["perplexity", &model, "-f", &file, "--ctx", "16", "--json"]).success();
    let object: Value = serde_json::from_str(&object).unwrap();
    assert!(ids[0] == 509 && ids.len() > 32 && object["tokens"] == surprises.len());
    assert!((number(&object, "perplexity").ln() - mean).abs() < 1e-6, "{object} {mean}");
}

/// The model's own stories are texts that it predicts well, so a wrong position or token shows.
#[test]
fn the_precision_hardly_changes_it_and_the_threads_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("stories");
    let mut stories = String::new();
    for seed in ["1", "2"] {
        let args = ["run", &demo_model(), "--raw", "-p", STORY, "-n", "600", "--ignore-eos", "--seed", seed];
        stories += &common::Outcome::from(common::forebay(args).output().unwrap()).success();
    }
    std::fs::write(&file, stories).unwrap();
    let fast = perplexity(&file, &["--threads", "1"]);
    assert!(number(&fast, "tokens") > 1000.0 && number(&fast, "windows") >= 3.0, "{fast}");
    assert!((1.5..30.0).contains(&number(&fast, "perplexity")), "{fast}");
    assert_eq!(perplexity(&file, &["--threads", "3"])["perplexity"], fast["perplexity"]);
    let exact = perplexity(&file, &["--exact"]);
    let ratio = number(&exact, "perplexity") / number(&fast, "perplexity");
    assert!((ratio - 1.0).abs() < 0.005 && ratio != 1.0, "{exact} {fast}");
}

#[test]
fn what_cannot_be_predicted_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = text(&folder.path().join("text"));
    std::fs::write(&file, "").unwrap();
    let refused = |more: &[&str], code| {
        call(&[&["perplexity", &golden("qwen3moe.gguf"), "-f", &file], more].concat()).failure(code)
    };
    assert_eq!(
        refused(&[], 1),
        format!("{file} is too short: it has 0 of the 2 tokens that a prediction needs; use a longer text")
    );
    std::fs::write(&file, b"\xff").unwrap();
    assert!(refused(&[], 1).starts_with(&format!("{file} is not UTF-8 text")));
    std::fs::write(&file, "Some words").unwrap();
    assert!(refused(&["--ctx", "9999999"], 1).contains("a context of 9999999 tokens is longer"));
    assert!(refused(&["--ctx", "1"], 2).contains("--ctx needs at least 2"));
    let missing = call(&["perplexity", &demo_model(), "-f", "no/such/text"]).failure(1);
    assert!(missing.starts_with("cannot read no/such/text"), "{missing}");
}
