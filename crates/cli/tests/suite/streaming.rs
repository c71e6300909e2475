//! Running in less memory than the model takes, through the program.

use serde_json::Value;

use crate::common::{call, demo_model};

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&call(args).success()).unwrap()
}

#[test]
fn an_answer_does_not_depend_on_the_memory() {
    let model = demo_model();
    let run = |more: &[&str]| {
        let args =
            ["run", &model, "-p", "Tell me a story about a boat.", "-n", "40", "--seed", "3", "--json"];
        json(&[&args, more].concat())
    };
    let resident = run(&[]);
    let experts = |answer: &Value| answer["stats"]["experts"].clone();
    assert_eq!(experts(&resident)["misses"], 0);
    for more in [
        &["--expert-memory", "4M", "--heat", "off"][..],
        &["--expert-memory", "30%", "--heat", "off", "--io", "pool", "--policy", "lru", "--prefetch", "on"],
    ] {
        let streamed = run(more);
        assert_eq!(streamed["text"], resident["text"], "{more:?}");
        let experts = experts(&streamed);
        assert!(experts["misses"].as_u64().unwrap() > 0 && experts["bytes_read"].as_u64().unwrap() > 0);
        let memory = &streamed["stats"]["memory"];
        assert!(memory["planned"].as_u64().unwrap() <= memory["budget"].as_u64().unwrap());
        let bound = &streamed["stats"]["bound"];
        assert_eq!(bound["name"], "drive", "a model this small is in the caches: {bound}");
        assert!(bound["tokens_per_second"].as_f64().unwrap() > 0.0 && bound["ratio"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn a_plan_adds_up_and_says_what_it_means() {
    let model = demo_model();
    let plan = json(&["plan", &model, "--memory", "56M", "--no-probe", "--json"]);
    let number = |key: &str| plan[key].as_u64().unwrap();
    assert_eq!(number("budget"), 56 << 20);
    let parts = number("dense") + number("kv") + number("scratch") + number("process");
    assert_eq!(number("planned"), parts + plan["expert_slots"]["bytes"].as_u64().unwrap());
    assert!(number("planned") <= number("budget"));
    assert_eq!(plan["tokens_per_second"], Value::Null);

    assert!(plan["verdict"].as_str().unwrap().starts_with("Runs; "), "{plan}");
    assert_eq!((&plan["limit"], &plan["runs"]), (&Value::Null, &Value::Bool(true)));

    let text = call(&["plan", &model]).success();
    for expected in
        ["budget", "dense weights", "Runs wholly from memory; about ", "memory bandwidth", "tok/s"]
    {
        assert!(text.contains(expected), "{text}");
    }
}

/// What somebody plans is not refused with an error, but told.
#[test]
fn a_plan_that_cannot_work_is_a_verdict_and_a_failure() {
    let args = ["plan", &demo_model(), "--memory", "1M"];
    let outcome = call(&args);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(1), ""));
    assert!(outcome.stdout.starts_with("Does not run in 1 MiB: needs at least "), "{}", outcome.stdout);
    assert!(outcome.stdout.contains("--memory"), "{}", outcome.stdout);
    let object: Value = serde_json::from_str(&call(&[&args[..], &["--json"]].concat()).stdout).unwrap();
    assert_eq!((&object["runs"], &object["limit"]), (&Value::Bool(false), &Value::from("memory size")));
    let least = object["least_memory"].as_u64().unwrap();
    let enough = (least + (8 << 20)).to_string();
    call(&["plan", &demo_model(), "--memory", &enough, "--no-probe"]).success();
}

/// As `plan` shows it, with what only a server has.
#[test]
fn a_server_shows_its_plan() {
    let text = call(&["serve", &demo_model(), "--plan", "--parallel", "7"]).success();
    assert!(text.starts_with("memory    [") && text.contains("Runs wholly from memory; about "), "{text}");
    assert!(text.lines().any(|line| line.starts_with("answers at once") && line.contains(" 7 ")), "{text}");
}

#[test]
fn a_budget_that_cannot_work_says_which_flag_to_change() {
    let outcome = call(&["run", &demo_model(), "-p", "x", "--memory", "1M"]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(1), ""));
    assert!(outcome.stderr.contains("--memory") && outcome.stderr.contains("1.0 MiB"), "{}", outcome.stderr);
    for wrong in [["--memory", "lots"], ["--expert-memory", "0%"], ["--io", "tape"], ["--policy", "fifo"]] {
        let outcome = call(&[&["plan", "--no-probe"][..], &wrong].concat());
        assert_eq!(outcome.code, Some(2), "{wrong:?}: {}", outcome.stderr);
    }
}

/// What the machine does not have cannot be meant, unless somebody asks what another machine would do.
#[cfg(target_os = "linux")]
#[test]
fn more_memory_than_there_is_may_be_planned_with_but_not_used() {
    let message = call(&["run", &demo_model(), "-p", "x", "--memory", "999T"]).failure(1);
    assert!(
        message.starts_with("999.0 TiB of memory is needed") && message.contains("set --memory lower"),
        "{message}"
    );
    let plan = json(&["plan", &demo_model(), "--memory", "999T", "--no-probe", "--json"]);
    assert_eq!((&plan["budget"], &plan["exceeds_machine"]), (&Value::from(999u64 << 40), &Value::Bool(true)));
    let text = call(&["plan", &demo_model(), "--memory", "999T", "--no-probe"]).success();
    assert!(text.contains("With 999 TiB of memory, more than the "), "{text}");
}
