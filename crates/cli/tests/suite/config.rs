//! The file of settings: what wins over what, what is shown, and what is refused.

use std::path::Path;

use tempfile::TempDir;

use crate::common::{Outcome, call, demo_model, forebay, golden, text};

/// A home for settings, with these in it.
fn home(settings: &str) -> TempDir {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join("forebay")).unwrap();
    std::fs::write(home.path().join("forebay/config.toml"), settings).unwrap();
    home
}

fn call_at(home: &Path, args: &[&str]) -> Outcome {
    forebay(args).env("XDG_CONFIG_HOME", home).output().unwrap().into()
}

/// The line of a setting, and its origin.
fn setting(shown: &str, key: &str) -> (String, String) {
    let line = shown
        .lines()
        .find(|line| line.starts_with(&format!("{key} = ")))
        .unwrap_or_else(|| panic!("{shown}"));
    let (assignment, origin) = line.split_once("# ").unwrap();
    (assignment.trim_end().to_owned(), origin.to_owned())
}

#[test]
fn flags_win_over_the_file_and_the_file_over_defaults() {
    let home = home("# mine\nmemory = \"8G\"\nthreads = 1\nheat = false\ntemp = 0.5\n");
    let args = ["run", "-p", "Hi", "--print-config", "--threads", "2"];
    let shown = call_at(home.path(), &args).success();
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(setting(&shown, "memory"), pair("memory = \"8G\"", "the file, line 2"));
    assert_eq!(setting(&shown, "threads"), pair("threads = 2", "the command line"));
    assert_eq!(setting(&shown, "heat"), pair("heat = \"off\"", "the file, line 4"));
    assert_eq!(setting(&shown, "temp"), pair("temp = 0.5", "the file, line 5"));
    assert_eq!(setting(&shown, "prefetch"), pair("prefetch = \"on\"", "default"));
    assert!(shown.contains("# ctx is not set: the model's maximum"), "{shown}");
    assert!(shown.starts_with(&format!("# file: {}\n", home.path().join("forebay/config.toml").display())));

    // What is shown is a file that has the same effect.
    let other = self::home(&shown);
    let again = call_at(other.path(), &["run", "-p", "Hi", "--print-config"]).success();
    let values = |shown: &str| -> Vec<String> {
        shown
            .lines()
            .filter(|l| !l.starts_with('#'))
            .map(|l| l.split('#').next().unwrap().to_owned())
            .collect()
    };
    assert_eq!(values(&again), values(&shown));
}

#[test]
fn settings_have_an_effect() {
    let home = home(&format!("model = {:?}\nmemory = \"10M\"\n", golden("qwen3moe.gguf")));
    let message = call_at(home.path(), &["run", "-p", "Hi"]).failure(1);
    assert!(message.contains("but 10.0 MiB is available"), "{message}");
    let plan = |home: &Path, args: &[&str]| -> serde_json::Value {
        let args = [&["plan", "--no-probe", "--json"], args].concat();
        serde_json::from_str(&call_at(home, &args).success()).unwrap()
    };
    let of_file = plan(home.path(), &["--memory", "100M"]);
    let named = plan(Path::new("/nonexistent"), &[&golden("qwen3moe.gguf"), "--memory", "100M"]);
    assert_eq!((&of_file["experts"], &of_file["budget"]), (&named["experts"], &named["budget"]));
    let demo = plan(home.path(), &[&demo_model(), "--memory", "100M"]);
    assert_ne!(of_file["experts"], demo["experts"]);
}

#[test]
fn a_request_without_a_model_is_answered_by_the_one_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let [requests, out] = ["in", "out"].map(|name| folder.path().join(name));
    let line =
        r#"{"custom_id": "1", "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}}"#;
    std::fs::write(&requests, format!("{line}\n")).unwrap();
    let home = home("model = \"no/such/model.gguf\"\n");
    let message = call_at(home.path(), &["batch", &text(&requests), "--out", &text(&out)]).failure(1);
    assert!(message.starts_with("no/such/model.gguf: cannot open"), "{message}");
}

#[test]
fn what_is_wrong_in_a_file_is_named_with_its_line() {
    for (settings, line, what) in [
        (
            "threads = 2\nmemry = 1\n",
            2,
            "there is no setting \"memry\"; the settings are model, memory, expert-memory",
        ),
        ("\n\nmemory = \"lots\"", 3, "memory = \"lots\": expected a size, such as 8G or 512M"),
        ("top_p = 2", 1, "top_p = 2: top_p is 2, but must be"),
        ("memory = ", 1, ""),
    ] {
        let home = home(settings);
        let message = call_at(home.path(), &["run", "-p", "Hi"]).failure(2);
        let place = format!("{}, line {line}: ", home.path().join("forebay/config.toml").display());
        assert!(message.starts_with(&format!("{place}{what}")), "{message}");
        // Commands that have none of the settings work all the same.
        assert_eq!(call_at(home.path(), &["inspect", &demo_model()]).code, Some(0));
        assert_eq!(call_at(home.path(), &["completions", "bash"]).code, Some(0));
    }
}

#[test]
fn another_file_can_be_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    std::fs::write(&path, "threads = 3\n").unwrap();
    let home = home("threads = 5\n");
    for args in [
        ["--config", &text(&path), "bench", "--print-config"],
        ["bench", "--config", &text(&path), "--print-config"],
    ] {
        let shown = call_at(home.path(), &args).success();
        assert_eq!(setting(&shown, "threads").0, "threads = 3");
    }
    let message = call(&["run", "-p", "Hi", "--config", "no/such/file"]).failure(1);
    assert!(message.starts_with("cannot read the settings in no/such/file: No such file"), "{message}");
}

#[test]
fn all_settings_are_shown_without_a_command_and_only_its_own_with_one() {
    let shown = call(&["--print-config"]).success();
    for key in ["model", "memory", "ctx", "io", "policy", "temp", "penalty-last-n", "port", "prefix-disk"] {
        assert!(shown.lines().any(|line| line.trim_start_matches("# ").starts_with(key)), "{key}: {shown}");
    }
    assert!(shown.starts_with("# no file; it would be /nonexistent/forebay/config.toml\n"), "{shown}");
    // A window of `perplexity` is no context, whatever its flag is called.
    let home = home("ctx = 64\n");
    let args = ["perplexity", "-f", "Cargo.toml", "--print-config"];
    let shown = call_at(home.path(), &args).success();
    assert!(shown.contains("threads") && !shown.contains("ctx") && !shown.contains("temp"), "{shown}");
}
