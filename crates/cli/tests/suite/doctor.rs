//! `doctor`, `plan` and `inspect`: the shape of what they tell. How fast a machine is, is not tested.

use serde_json::Value;

use crate::common::{call, demo_model, forebay, golden};

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&call(args).success()).unwrap()
}

#[track_caller]
fn is_range(range: &Value) {
    let [low, middle, high] = ["low", "middle", "high"].map(|key| range[key].as_f64().unwrap());
    assert!(0.0 <= low && low <= middle && middle <= high, "{range}");
}

#[test]
fn a_machine_is_described_without_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let doctor = |more: &[&str]| {
        let args = [&["doctor", "--quick"], more].concat();
        let output = forebay(args).current_dir(folder.path()).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
        String::from_utf8(output.stdout).unwrap()
    };
    let text = doctor(&[]);
    for expected in [
        "Memory can be read at ",
        "instruction set",
        "CPUs",
        "memory limits",
        "memory bandwidth",
        "huge pages",
        "drive reads",
        "GPU",
    ] {
        assert!(text.contains(expected), "no {expected:?} in:\n{text}");
    }
    assert!(!text.contains("least memory"), "{text}");

    let report: Value = serde_json::from_str(&doctor(&["--json", "--io", "pool"])).unwrap();
    assert!(report["processor"]["instruction_sets"].as_array().unwrap().contains(&"scalar".into()));
    assert!(report["memory"]["read_bytes_per_second"].as_f64().unwrap() > 0.0);
    assert!(report["drive"]["reads"].as_str().unwrap().contains("threads"), "{report}");
    let depths: Vec<_> = report["drive"]["depths"]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| d["together"].as_u64().unwrap())
        .collect();
    assert_eq!(depths, [1, 2, 4, 8]);
    assert_eq!((&report["model"], &report["bottleneck"]), (&Value::Null, &Value::Null));
    assert_eq!(report["gpu"]["used"], false);
}

#[test]
fn a_models_bottleneck_is_named() {
    let model = demo_model();
    let report = json(&["doctor", &model, "--quick", "--json", "--expert-memory", "25%", "--heat", "off"]);
    // How fast the machine is, is not known here; what follows from it is.
    let number = |value: &Value| value.as_f64().unwrap();
    let computing = number(&report["model"]["compute_bytes_per_second"]);
    let (expected, measured) = if number(&report["model"]["prediction"]["waiting_for_drive"]) >= 0.4 {
        ("drive", "Memory holds 25 % of the experts.")
    } else if computing >= 0.6 * number(&report["memory"]["read_bytes_per_second"]) {
        ("memory bandwidth", "Weights are computed at ")
    } else {
        ("processor", "Weights are computed at ")
    };
    assert!(computing > 0.0, "{report}");
    assert_eq!((&report["bottleneck"], &report["model"]["bottleneck"]), (&expected.into(), &expected.into()));
    let finding = &report["findings"][0];
    assert!(finding["measured"].as_str().unwrap().starts_with(measured), "{report}");
    assert!(!finding["change"].as_str().unwrap().contains("Q4_K"), "the model is of that type: {report}");
    assert!(report["verdict"].as_str().unwrap().starts_with("Runs; about "), "{report}");
    is_range(&report["model"]["prediction"]["tokens_per_second"]);
    is_range(&report["model"]["prediction"]["hit_rate"]);
    assert_eq!(report["model"]["share_of_experts"], 0.25);

    let text = call(&["doctor", &model, "--quick"]).success();
    for expected in
        ["Runs wholly from memory; about ", "Tales qwen3moe, ", "least memory", "limit", "tok/s ("]
    {
        assert!(text.contains(expected), "no {expected:?} in:\n{text}");
    }
    let timed = json(&["doctor", &model, "--seconds", "1", "--json"]);
    let endurance = &timed["drive"]["endurance"];
    assert!(
        endurance["last_bytes_per_second"].as_f64().unwrap() > 0.0 && endurance["throttles"].is_boolean()
    );
}

/// A model that cannot run is what a doctor is asked about.
#[test]
fn too_little_memory_is_a_diagnosis_and_no_failure() {
    let report = json(&["doctor", &demo_model(), "--quick", "--json", "--memory", "1M"]);
    assert_eq!(report["bottleneck"], "memory size");
    assert!(
        report["verdict"].as_str().unwrap().starts_with("Does not run in 1 MiB: needs at least "),
        "{report}"
    );
    let least = report["model"]["least_memory"].as_u64().unwrap();
    assert!(report["findings"][0]["measured"].as_str().unwrap().contains("at least"));
    let fits =
        json(&["plan", &demo_model(), "--no-probe", "--json", "--memory", &(least + (8 << 20)).to_string()]);
    assert!(fits["planned"].as_u64().unwrap() <= least + (8 << 20));
}

#[test]
fn wrong_calls_of_the_doctor_are_refused() {
    let message = call(&["doctor", "no/such/model.gguf", "--quick"]).failure(1);
    assert!(message.contains("no/such/model.gguf"), "{message}");
    for wrong in [&["--quick", "--seconds", "3"][..], &["--seconds", "0"]] {
        assert_eq!(call(&[&["doctor"], wrong].concat()).code, Some(2));
    }
}

#[test]
fn a_plan_predicts_a_range_and_what_would_help() {
    let model = demo_model();
    // A little more than the least that works, which depends on the size of the program itself.
    let refused: Value =
        serde_json::from_str(&call(&["plan", &model, "--memory", "20M", "--json"]).stdout).unwrap();
    let memory = (refused["least_memory"].as_u64().unwrap() + (2 << 20)).to_string();
    let plan = json(&["plan", &model, "--memory", &memory, "--heat", "off", "--json"]);
    assert_eq!(plan["streams"], true, "{plan}");
    is_range(&plan["tokens_per_second"]);
    is_range(&plan["hit_rate"]);
    let hits = plan["hit_rate"]["low"].as_f64().unwrap();
    assert!(hits >= plan["uniform_hit_rate"].as_f64().unwrap() - 1e-9);
    assert_eq!(plan["use_of_experts"], "typical");
    let changes = plan["changes"].as_array().unwrap();
    assert!(changes.iter().any(|c| c["hit_rate"]["middle"] == 1.0), "{plan}");
    assert!(changes.iter().any(|c| c["drive_factor"] == 2.0));
    for change in changes {
        is_range(&change["tokens_per_second"]);
        assert!(change["memory"].as_u64().unwrap() >= plan["budget"].as_u64().unwrap());
    }

    let text = call(&["plan", &model, "--memory", &memory, "--heat", "off"]).success();
    for expected in [
        "memory    [",
        "experts   [",
        "on the drive",
        "what would help",
        "The range assumes",
        "cache hit rate",
    ] {
        assert!(text.contains(expected), "no {expected:?} in:\n{text}");
    }
    let bars: Vec<_> = text.lines().filter(|l| l.contains('[')).map(|l| l.chars().count()).collect();
    assert_eq!(bars, [100, 100], "without a terminal a line has 100 columns");

    let resident = call(&["plan", &model]).success();
    assert!(resident.contains("generation") && !resident.contains("what would help"), "{resident}");
}

/// What a run has learned is in the next plan.
#[test]
fn a_plan_knows_what_was_hot() {
    let folder = tempfile::tempdir().unwrap();
    let cached = |args: &[&str]| {
        let output = forebay(args).env("XDG_CACHE_HOME", folder.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let model = demo_model();
    let plan = || -> Value {
        serde_json::from_str(&cached(&["plan", &model, "--expert-memory", "30%", "--json"])).unwrap()
    };
    assert_eq!(plan()["use_of_experts"], "typical");
    cached(&["bench", &model, "-p", "0", "-n", "32", "-r", "1", "--expert-memory", "30%"]);
    let plan = plan();
    assert_eq!(plan["use_of_experts"], "remembered");
    let middle = plan["hit_rate"]["middle"].as_f64().unwrap();
    assert!(middle > plan["uniform_hit_rate"].as_f64().unwrap() && middle < 1.0);
}

#[test]
fn inspect_says_what_a_model_is_and_takes() {
    let model = demo_model();
    let text = call(&["inspect", &model]).success();
    let first = text.lines().next().unwrap();
    assert_eq!(
        first,
        "A mixture of experts (qwen3moe) of 27.8 M parameters in 8 layers, with 16 experts per layer, 4 used per token; \
         context up to 1024 tokens."
    );
    for expected in
        ["tokenizer      byte-level BPE", "chat template  included", "per token", "least memory", "sizes"]
    {
        assert!(text.lines().any(|l| l.starts_with(expected)), "no {expected:?} in:\n{text}");
    }
    let object = json(&["inspect", &model, "--json"]);
    assert_eq!(object["cannot_run"], Value::Null);
    assert_eq!((&object["vocabulary"], &object["chat_template"]), (&4096.into(), &true.into()));
    let roles = object["roles"].as_array().unwrap();
    let tensors = json(&["inspect", &model, "--json", "--tensors"]);
    let all: u64 =
        tensors["tensor_list"].as_array().unwrap().iter().map(|t| t["bytes"].as_u64().unwrap()).sum();
    assert_eq!(roles.iter().map(|r| r["bytes"].as_u64().unwrap()).sum::<u64>(), all);
    assert_eq!(roles.iter().map(|r| r["tensors"].as_u64().unwrap()).sum::<u64>(), 98);
    for role in roles {
        let types: u64 = role["types"].as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum();
        assert_eq!(role["bytes"], types);
    }
    let read = object["bytes_per_token"].as_u64().unwrap();
    assert!(read > 0 && read < all);
    assert!(object["least_memory"].as_u64().unwrap() <= object["memory_for_all"].as_u64().unwrap());
    assert!(json(&["inspect", &golden("qwen3moe.gguf"), "--json"])["least_memory"].is_u64());
}
