//! Calls that cannot work: the exit code, and one line that says why.

use crate::common;
use crate::common::{call, demo_model, forebay, golden, text};

const COMMANDS: [&str; 6] = ["run", "inspect", "tokenize", "logits", "perplexity", "bench"];

/// Every command that takes a model, with the arguments it needs.
fn on_model(model: &str) -> [Vec<String>; 6] {
    let folder = std::env::temp_dir().join("forebay-never-written.safetensors");
    [
        vec!["run", model, "-p", "Hi"],
        vec!["inspect", model],
        vec!["tokenize", model, "--text", "Hi"],
        vec!["logits", model, "--tokens", "1,2", "--out", folder.to_str().unwrap()],
        vec!["perplexity", model, "-f", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")],
        vec!["bench", model, "-p", "1", "-n", "1", "-r", "1"],
    ]
    .map(|args| args.into_iter().map(str::to_owned).collect())
}

#[track_caller]
fn every_command_names(model: &str, reason: &str) {
    for args in on_model(model) {
        let message = common::Outcome::from(forebay(&args).output().unwrap()).failure(1);
        assert!(message.starts_with(model), "{args:?}: {message}");
        assert_eq!(message.matches(reason).count(), 1, "{args:?}: {message}");
    }
}

#[test]
fn a_missing_file_is_named() {
    every_command_names("no/such/model.gguf", "cannot open: No such file");
}

#[test]
fn a_folder_without_a_model_is_named() {
    let folder = tempfile::tempdir().unwrap();
    every_command_names(&text(folder.path()), "it has no config.json");
}

#[test]
fn a_file_that_is_no_model_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notes.txt");
    std::fs::write(&path, "These are notes, and nothing but notes.").unwrap();
    every_command_names(&text(&path), "not a GGUF file");
    std::fs::write(&path, "").unwrap();
    every_command_names(&text(&path), "the file is empty");
}

#[test]
fn a_truncated_model_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("part.gguf");
    let whole = std::fs::read(golden("qwen3moe.gguf")).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    every_command_names(&text(&path), "the file is incomplete");
    std::fs::write(&path, &whole[..100]).unwrap();
    for args in on_model(&text(&path)) {
        let message = common::Outcome::from(forebay(&args).output().unwrap()).failure(1);
        assert!(message.starts_with(&text(&path)), "{message}");
    }
}

#[test]
fn calls_that_make_no_sense_exit_with_2_and_name_the_flag() {
    let model = demo_model();
    let calls: [(&[&str], &str); 20] = [
        (&[], "Usage: forebay"),
        (&["fly"], "'fly'"),
        (&["run", "--fly"], "'--fly'"),
        (&["run", "-p", "Hi", "-n", "many"], "--max-tokens"),
        (&["run", "-p", "Hi", "-n", "-1"], "-1"),
        (&["run", "-p", "Hi", "--ctx", "0"], "--ctx"),
        (&["run", "-p", "Hi", "--threads", "0"], "--threads"),
        (&["run", "-p", "Hi", "--temp", "-1"], "temperature is -1, but must be"),
        (&["run", "-p", "Hi", "--temp", "NaN"], "temperature is NaN, but must be"),
        (&["run", "-p", "Hi", "--top-p", "2"], "top_p is 2, but must be"),
        (&["run", "-p", "Hi", "--logit-bias", "cat=1"], "--logit-bias"),
        (&["inspect"], "<MODEL>"),
        (&["tokenize", &model, "--text", "Hi", "--file", "x"], "cannot be used with"),
        (&["logits", &model, "--tokens", "1,2"], "--out"),
        (&["logits", &model, "--tokens", "1,cat", "--out", "x"], "\"cat\" is not a token number"),
        (&["logits", &model, "--tokens", "", "--out", "x"], "--tokens"),
        (&["perplexity", &model], "--file"),
        (&["bench", &model, "-p", "8,many"], "--prompt"),
        (&["bench", &model, "-r", "0"], "--repetitions"),
        (&["bench", &model, "-o", "xml"], "--output"),
    ];
    for (args, mention) in calls {
        let outcome = call(args);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{args:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(mention), "{args:?}: {}", outcome.stderr);
    }
}

#[test]
fn flags_of_other_programs_are_explained() {
    for (args, instead) in [
        (
            &["run", "m.gguf", "-ngl", "99"][..],
            "-ngl is not a flag of Forebay. It counts layers, but Forebay places single experts",
        ),
        (&["serve", "--n-gpu-layers=99"], "--n-gpu-layers is not a flag of Forebay. "),
        (&["bench", "-ot", "exps=CPU"], "-ot is not a flag of Forebay. Forebay decides by itself"),
        (&["run", "-fa", "on"], "-fa is not a flag of Forebay. "),
        (&["run", "--mlock"], "--io chooses how"),
        (&["serve", "-np", "4"], "Use --parallel"),
        (&["chat"], "chat is not a command of Forebay; `forebay run` answers a prompt"),
        (&["show", "m.gguf"], "`forebay inspect` describes a model"),
        (&["m.gguf", "-c", "9"], "m.gguf is not a command; `forebay run m.gguf` opens a chat"),
        (&["OWNER/NAME:Q4_K_M"], "`forebay run OWNER/NAME:Q4_K_M` opens a chat"),
    ] {
        let message = call(args).failure(2);
        assert!(message.contains(instead), "{args:?}: {message}");
    }
    // In a text they are words like any others.
    call(&["run", "-p", "-ngl", "-n", "1"]).success();
    call(&["tokenize", &demo_model(), "--text", "--mlock"]).success();
}

#[test]
fn mistaken_values_are_explained_in_plain_words() {
    for (args, message) in [
        (
            &["run", "-n", "-1"][..],
            "expected a whole number of 0 or more; for the default, leave the flag out",
        ),
        (
            &["run", "--seed", "-1"],
            "invalid value '-1' for '--seed <N>': expected a whole number of 0 or more",
        ),
        (&["run", "--top-k", "many"], "invalid value 'many' for '--top-k <K>': expected a whole number"),
        (&["run", "--seed", "99999999999999999999"], "the number is too large"),
        (&["run", "--temp", "hot"], "invalid value 'hot' for '--temp <T>': expected a number, such as 0.7"),
        (&["serve", "--port", "x"], "--port"),
        (&["run", "--temp", "-1"], "temperature is -1, but must be"),
    ] {
        let refusal = call(args).failure(2);
        assert!(refusal.contains(message), "{args:?}: {refusal}");
        assert!(!refusal.contains("digit") && !refusal.contains("literal"), "{args:?}: {refusal}");
    }
    let unknown = call(&["run", "--warp", "9"]).stderr;
    assert!(unknown.contains("unexpected argument '--warp'") && !unknown.contains("tip:"), "{unknown}");
    let misspelt = call(&["run", "--memry", "9G"]).stderr;
    assert!(misspelt.contains("a similar argument exists: '--memory'"), "{misspelt}");
}

#[test]
fn familiar_names_of_flags_mean_the_same() {
    let with = |args: &[&str]| call(&[&["run", "--print-config", "-p", "Hi"], args].concat()).success();
    let ours = ["--ctx", "64", "--threads", "1", "--temp", "0.5", "--penalty-last-n", "9"];
    let theirs = ["--ctx-size", "64", "-t", "1", "--temperature", "0.5", "--repeat-last-n", "9"];
    assert_eq!(with(&ours), with(&theirs));
    assert_eq!(with(&["--ctx", "64"]), with(&["-c", "64"]));
    let model = demo_model();
    let args = ["--temp", "0", "-p", "Hi", "--raw"];
    let expected = call(&[&["run", &model, "-n", "5", "--seed", "1"], &args[..]].concat()).success();
    for call_of in [
        &["run", "-m", &model, "--predict", "5", "-s", "1"][..],
        &["run", "--model", &model, "--n-predict", "5"],
        &["run", &model, "-m", &model, "-n", "5"],
    ] {
        assert_eq!(call(&[call_of, &args].concat()).success(), expected);
    }
    let message = call(&["run", &model, "-m", "other.gguf", "-p", "Hi"]).failure(2);
    assert!(message.starts_with("two models were given: "), "{message}");
    let message = call(&["inspect"]).stderr;
    assert!(message.contains("MODEL"), "{message}");
}

#[test]
fn a_few_bytes_of_memory_are_refused_with_what_is_meant() {
    for flag in ["--memory", "--expert-memory", "--vram"] {
        let outcome = call(&["run", "-p", "Hi", flag, "6"]);
        assert_eq!(outcome.code, Some(2));
        assert!(outcome.stderr.contains("6 bytes is too small; did you mean 6G?"), "{}", outcome.stderr);
    }
}

#[test]
fn a_wrong_flag_is_found_before_the_model_is_opened() {
    let message = call(&["run", "no/such/model.gguf", "-p", "Hi", "--min-p", "7"]).failure(2);
    assert!(message.starts_with("min_p is 7"), "{message}");
}

#[test]
fn help_is_there_for_every_command_and_fits_80_columns() {
    for command in COMMANDS {
        let args = [command, "--help"];
        let help = common::Outcome::from(forebay(args).env("COLUMNS", "80").output().unwrap()).success();
        assert!(help.contains(&format!("Usage: forebay {command}")) && help.contains("Examples:"), "{help}");
        let wide = help.lines().find(|line| line.chars().count() > 80);
        assert_eq!(wide, None, "{command}");
    }
    let help = call(&["--help"]).success();
    assert!(COMMANDS.iter().all(|c| help.contains(&format!("  {c} "))));
    assert!(call(&["--version"]).success().starts_with("forebay "));
}
