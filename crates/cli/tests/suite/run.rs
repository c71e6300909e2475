//! `forebay run` in a pipe: what it writes, and where.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::common::{Outcome, call, call_with_input, demo_model, forebay, golden, text};

const STORY: &str = "Tell me a story about a cat and a boat.";

#[track_caller]
fn json(args: &[&str]) -> Value {
    let args = [&["run", "--json"], args].concat();
    serde_json::from_str(&call(&args).success()).unwrap()
}

#[test]
fn a_prompt_gives_a_story_and_nothing_else() {
    let story = call(&["run", "-p", STORY, "--temp", "0"]).success();
    assert!(story.len() > 200 && story.contains("boat"), "{story}");
    assert!(story.ends_with(".\n") && !story.ends_with("\n\n"), "{story:?}");
    assert!(!story.contains("<|im_"), "{story}");
}

#[test]
fn the_model_by_its_path_is_the_model_by_default() {
    let args = ["-p", STORY, "--temp", "0", "-n", "20"];
    let named = call(&[&["run", &demo_model()], &args[..]].concat()).success();
    assert_eq!(named, call(&[&["run"], &args[..]].concat()).success());
}

#[test]
fn a_prompt_on_standard_input_is_the_prompt_of_the_flag() {
    let expected = call(&["run", "-p", STORY, "--temp", "0", "-n", "30"]).success();
    for end in ["", "\n", "\r\n"] {
        let input = format!("{STORY}{end}");
        assert_eq!(
            call_with_input(&["run", "--temp", "0", "-n", "30"], input.as_bytes()).success(),
            expected
        );
    }
}

#[test]
fn a_prompt_may_follow_the_model() {
    let expected = call(&["run", "-p", STORY, "--temp", "0", "-n", "30"]).success();
    let model = demo_model();
    assert_eq!(call(&["run", &model, STORY, "--temp", "0", "-n", "30"]).success(), expected);
    let both = call(&["run", &model, STORY, "-p", STORY]);
    assert_eq!(both.code, Some(2));
    assert!(both.stderr.contains("cannot be used with"), "{}", both.stderr);
}

#[test]
fn piped_text_follows_the_prompt_after_a_blank_line() {
    let args = ["--temp", "0", "-n", "30"];
    let expected =
        call(&[&["run", "-p", "Tell a story:\n\nA cat and\na boat."], &args[..]].concat()).success();
    let piped = |prompt: &[&str], input: &[u8]| {
        let model = demo_model();
        let call = [&["run", &model], prompt, &args].concat();
        call_with_input(&call, input).success()
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompt");
    std::fs::write(&file, "Tell a story:\n").unwrap();
    let file = text(&file);
    for prompt in
        [&["-p", "Tell a story:"][..], &["Tell a story:"], &["-f", &file], &["--prompt-file", &file]]
    {
        assert_eq!(piped(prompt, b"A cat and\na boat.\n"), expected);
    }
    // An empty pipe adds nothing.
    let alone = call(&[&["run", "-p", STORY], &args[..]].concat()).success();
    assert_eq!(piped(&["-p", STORY], b"\n"), alone);
}

#[test]
fn an_empty_prompt_is_refused() {
    for outcome in [call(&["run"]), call(&["run", "-p", ""]), call_with_input(&["run"], b"\n")] {
        assert!(outcome.failure(2).starts_with("the prompt is empty: give one after the model, with -p"));
    }
}

#[test]
fn a_prompt_that_is_not_text_is_refused() {
    let message = call_with_input(&["run"], b"\xff\xfe").failure(1);
    assert!(message.starts_with("cannot read standard input"), "{message}");
}

#[test]
fn a_prompt_may_start_with_a_hyphen() {
    call(&["run", "-p", "- a cat", "-n", "2"]).success();
}

#[test]
fn json_has_the_promised_shape() {
    let answer = json(&["-p", STORY, "--temp", "0", "-n", "20"]);
    let keys: Vec<_> = answer.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys, ["text", "reasoning", "tokens", "finish_reason", "seed", "stats"]);
    assert!(answer["text"].as_str().unwrap().len() > 20);
    let tokens = answer["tokens"].as_array().unwrap();
    assert!(tokens.iter().all(Value::is_u64));
    assert_eq!(tokens.len(), 20);
    assert_eq!(answer["finish_reason"], "length");
    assert!(answer["seed"].is_u64());

    let stats = &answer["stats"];
    assert_eq!(stats["generated_tokens"], 20);
    assert!(stats["prompt_tokens"].as_u64().unwrap() > 10);
    let seconds = |name: &str| stats[name].as_f64().unwrap();
    assert!(seconds("prompt_seconds") > 0.0 && seconds("decode_seconds") > 0.0);
    assert!(seconds("ttft_seconds") >= seconds("prompt_seconds"));
    assert!(seconds("ttft_seconds") <= seconds("prompt_seconds") + seconds("decode_seconds"));
    for (speed, tokens, time) in [
        ("prompt_tokens_per_second", "prompt_tokens", "prompt_seconds"),
        ("tokens_per_second", "decode_steps", "decode_seconds"),
    ] {
        let ratio = seconds(speed) * seconds(time) / seconds(tokens);
        assert!((ratio - 1.0).abs() < 1e-9, "{speed}: {stats}");
    }
    if cfg!(target_os = "linux") {
        let peak = stats["memory"]["peak_rss"].as_u64().unwrap();
        assert!((1 << 20..1 << 31).contains(&peak), "{peak} bytes");
    }
}

#[test]
fn json_and_text_are_the_same_answer() {
    let args = ["-p", STORY, "--temp", "0"];
    let answer = json(&args);
    assert_eq!(answer["finish_reason"], "stop");
    let text = call(&[&["run"], &args[..]].concat()).success();
    assert_eq!(text, format!("{}\n", answer["text"].as_str().unwrap()));
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let text = |seed: &str| json(&["-p", STORY, "--temp", "1", "--seed", seed, "-n", "40"])["text"].clone();
    assert_eq!(text("7"), text("7"));
    let texts: BTreeSet<_> = ["1", "2", "3"].iter().map(|seed| text(seed).to_string()).collect();
    assert!(texts.len() > 1, "the seed has no effect");
}

#[test]
fn the_seed_in_json_repeats_the_answer() {
    let args = ["-p", STORY, "--temp", "1", "-n", "40"];
    let first = json(&args);
    let seed = first["seed"].to_string();
    assert_eq!(json(&[&args[..], &["--seed", &seed]].concat())["text"], first["text"]);
}

#[test]
fn a_raw_prompt_is_continued_without_a_template() {
    let prompt = "Once upon a time, there was a little";
    let raw = json(&["--raw", "-p", prompt, "--temp", "0", "-n", "5"]);
    // The demo's file asks for no BOS token, so the prompt's tokens are all there are.
    let ids = call(&["tokenize", &demo_model(), "--text", prompt, "--ids"]).success();
    let ids: Vec<u32> = serde_json::from_str(&ids).unwrap();
    assert_eq!(raw["stats"]["prompt_tokens"], ids.len());
    assert!(raw["text"].as_str().unwrap().starts_with(" girl"), "{raw}");
    let chat = json(&["-p", prompt, "--temp", "0", "-n", "5"]);
    assert!(chat["stats"]["prompt_tokens"].as_u64() > raw["stats"]["prompt_tokens"].as_u64());
}

#[test]
fn a_raw_prompt_keeps_the_end_of_its_last_line() {
    let count = |input: &[u8]| {
        let answer = call_with_input(&["run", "--raw", "--json", "-n", "1"], input).success();
        serde_json::from_str::<Value>(&answer).unwrap()["stats"]["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!(count(b"a boat\n"), count(b"a boat") + 1);
}

#[test]
fn a_stop_string_ends_the_answer_and_is_no_part_of_it() {
    let whole = json(&["-p", STORY, "--temp", "0"])["text"].as_str().unwrap().to_owned();
    let before = whole.split(". ").next().unwrap();
    let stopped = json(&["-p", STORY, "--temp", "0", "--stop", "never this", "--stop", ". "]);
    assert_eq!(stopped["text"], before);
    assert_eq!(stopped["finish_reason"], "stop");
}

#[test]
fn ignore_eos_goes_on_past_the_end() {
    let args = ["-p", STORY, "--temp", "0"];
    let ended = json(&args)["stats"]["generated_tokens"].as_u64().unwrap();
    let most = (ended + 20).to_string();
    let longer = json(&[&args[..], &["--ignore-eos", "-n", &most]].concat());
    assert_eq!(longer["stats"]["generated_tokens"], ended + 20);
    assert_eq!(longer["finish_reason"], "length");
}

#[test]
fn an_answer_ends_where_the_context_does() {
    let answer = json(&["-p", STORY, "--ctx", "40", "--ignore-eos", "-n", "100000"]);
    let count = |name: &str| answer["stats"][name].as_u64().unwrap();
    assert_eq!(count("prompt_tokens") + count("generated_tokens"), 40);
    assert_eq!(answer["finish_reason"], "length");
}

#[test]
fn threads_do_not_change_the_answer() {
    let text = |n| call(&["run", "-p", STORY, "--temp", "0", "-n", "30", "--threads", n]).success();
    assert_eq!(text("1"), text("3"));
}

#[test]
fn a_logit_bias_forbids_a_token() {
    let args = ["-p", STORY, "--temp", "0", "-n", "1"];
    let first = json(&args)["tokens"][0].as_u64().unwrap();
    let bias = format!("{first}=-inf");
    assert_ne!(json(&[&args[..], &["--logit-bias", &bias]].concat())["tokens"][0], first);
}

#[test]
fn reasoning_is_as_long_as_it_may_be() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("template");
    std::fs::write(&template, "{{ messages[0].content }}\n<think>\n").unwrap();
    let args = ["--chat-template-file", &text(&template), "-p", STORY, "--temp", "0", "-n", "40"];
    let parts = |more: &[&str]| {
        let answer = json(&[&args[..], more].concat());
        ["reasoning", "text"].map(|part| answer[part].as_str().unwrap_or_default().to_owned())
    };
    let [reasoning, said] = parts(&[]);
    assert!(!reasoning.is_empty() && said.is_empty(), "it reasons for ever: {said}");
    let [some, said] = parts(&["--think-budget", "6"]);
    assert!(!some.is_empty() && reasoning.starts_with(&some) && !said.is_empty(), "{some:?}, {said:?}");
    // Where the answer must be something, there is none.
    let [none, said] = parts(&["--json-schema", r#"{"enum":[7]}"#, "--think-budget", "6"]);
    assert_eq!((none.as_str(), said.as_str()), ("", "7"));
}

#[test]
fn a_prompt_beyond_the_context_names_both_and_the_remedy() {
    let message = call(&["run", "-p", STORY, "--ctx", "10"]).failure(1);
    let start = " tokens do not fit the context of 10; use a larger --ctx (up to 1024 with this model)";
    assert!(message.contains(start), "{message}");
    let long = "a cat and a boat ".repeat(300);
    let message = call_with_input(&["run"], long.as_bytes()).failure(1);
    assert!(message.contains("do not fit the context of 1024") && !message.contains("--ctx"), "{message}");
}

#[test]
fn a_context_beyond_the_model_names_its_limit() {
    let message = call(&["run", "-p", STORY, "--ctx", "4096"]).failure(1);
    assert!(message.contains("4096") && message.contains("maximum of 1024"), "{message}");
}

#[test]
fn a_model_without_a_template_points_to_raw() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("base.gguf");
    let (key, other) = (b"tokenizer.chat_template", b"tokenizer.chat_tomplate");
    let mut bytes = std::fs::read(golden("qwen3moe.gguf")).unwrap();
    let at = bytes.windows(key.len()).position(|w| w == key).unwrap();
    bytes[at..at + key.len()].copy_from_slice(other);
    std::fs::write(&path, bytes).unwrap();
    let message = call(&["run", &text(&path), "-p", "Hi"]).failure(1);
    let expected = format!("{} has no chat template; give one with --chat-template-file", path.display());
    assert!(message.starts_with(&expected) && message.contains("--raw -p TEXT"), "{message}");
    let template = folder.path().join("template.jinja");
    std::fs::write(&template, "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    call(&["run", &text(&path), "--chat-template-file", &text(&template), "-p", "Hi", "-n", "1"]).success();
    std::fs::write(&template, "{% for %}").unwrap();
    let message =
        call(&["run", &text(&path), "--chat-template-file", &text(&template), "-p", "Hi"]).failure(1);
    assert!(message.contains("template.jinja is not a chat template"), "{message}");
    call(&["run", &text(&path), "--raw", "-p", "Hi", "-n", "1"]).success();
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error() {
    for args in [&["run", "-p", STORY, "-n", "5"][..], &["run", "-p", STORY, "-n", "5", "--json"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let outcome = Outcome::from(forebay(args).stdout(full).output().unwrap());
        let message = outcome.failure(1);
        assert!(message.starts_with("cannot write to standard output: No space left"), "{message}");
    }
}

#[test]
fn a_system_message_and_a_prompt_from_a_file_reach_the_template() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompt.txt");
    std::fs::write(&path, format!("{STORY}\n")).unwrap();
    let plain = json(&["-p", STORY, "--temp", "0", "-n", "5"]);
    let from_file = json(&["--prompt-file", &text(&path), "--temp", "0", "-n", "5"]);
    assert_eq!(from_file["tokens"], plain["tokens"]);
    let told = json(&["-p", STORY, "--system", "You tell stories.", "--temp", "0", "-n", "5"]);
    let tokens = |answer: &Value| answer["stats"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens(&told) > tokens(&plain) + 4);
}

#[test]
fn an_answer_can_be_made_to_be_json() {
    let schema = r#"{"type": "object", "properties": {"cat": {"enum": ["red", "black"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}}, "required": ["cat", "age"], "additionalProperties": false}"#;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("schema.json");
    std::fs::write(&file, schema).unwrap();
    let answers = [schema, file.to_str().unwrap()]
        .map(|schema| call(&["run", "-p", STORY, "--temp", "0", "--json-schema", schema]).success());
    assert_eq!(answers[0], answers[1]);
    let cat: Value = serde_json::from_str(&answers[0]).unwrap();
    assert!(cat["cat"] == "red" || cat["cat"] == "black", "{cat}");
    assert!(cat["age"].as_u64().unwrap() <= 30, "{cat}");
    assert_eq!(cat.as_object().unwrap().len(), 2);
}

#[test]
fn an_answer_can_be_made_to_follow_a_grammar() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("answer.lark");
    std::fs::write(&file, r#"start: "The cat is " ("red" | "black") ".""#).unwrap();
    let answer = call(&["run", "-p", STORY, "--grammar", file.to_str().unwrap()]).success();
    assert!(["The cat is red.\n", "The cat is black.\n"].contains(&answer.as_str()), "{answer}");
}

#[test]
fn what_an_answer_cannot_be_is_refused() {
    let with = |flag, value| call(&["run", "-p", STORY, flag, value]);
    assert!(with("--json-schema", "{").failure(2).contains("--json-schema is not JSON"));
    assert!(with("--json-schema", r#"{"type":"cat"}"#).failure(1).contains("Invalid type: cat"));
    assert!(with("--json-schema", "no/such/file").failure(1).contains("cannot read no/such/file"));
    assert!(with("--grammar", "no/such/file").failure(1).contains("cannot read no/such/file"));
}
