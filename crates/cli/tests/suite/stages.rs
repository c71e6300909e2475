//! `forebay plan --stages`: what each machine would hold of a model that is split by layers.

use serde_json::Value;

use crate::common::{call, demo_model};

fn plan(args: &[&str]) -> Value {
    serde_json::from_str(&call(&[&["plan", &demo_model(), "--json"], args].concat()).success()).unwrap()
}

fn sum(stages: &[Value], value: impl Fn(&Value) -> &Value) -> u64 {
    stages.iter().map(|stage| value(stage).as_u64().unwrap()).sum()
}

#[test]
fn the_stages_of_a_plan_are_the_model() {
    let whole = plan(&["--memory", "300M", "--no-probe"]);
    let staged = plan(&["--memory", "300M", "--no-probe", "--stages", "3"]);
    let stages = staged["stages"].as_array().unwrap();
    let layers: Vec<_> = stages.iter().map(|stage| stage["layers"].as_array().unwrap()).collect();
    assert_eq!(layers.len(), 3);
    assert!(layers[0][0] == 0 && layers.windows(2).all(|pair| pair[0][1] == pair[1][0]), "{staged}");
    assert_eq!(sum(stages, |stage| &stage["kv"]), whole["kv"].as_u64().unwrap());
    let experts = sum(stages, |stage| &stage["experts"]["count"]);
    assert_eq!(experts, whole["experts"]["count"].as_u64().unwrap());
    assert!(sum(stages, |stage| &stage["dense"]) >= whole["dense"].as_u64().unwrap());
    assert_eq!(staged["better"], "replicas", "the model fits one machine");
    assert_eq!(staged["tokens_per_second"], Value::Null, "nothing was measured");
}

#[test]
fn the_speed_of_stages_is_predicted_beside_that_of_one_machine() {
    let text = call(&["plan", &demo_model(), "--memory", "300M", "--stages", "2"]).success();
    for expected in ["2 stages would be slower", "one machine   ", "stage  layers", "2 ms"] {
        assert!(text.contains(expected), "no {expected:?} in:\n{text}");
    }
}

#[test]
fn impossible_stages_are_refused() {
    let model = demo_model();
    let message = call(&["plan", &model, "--stages", "9", "--no-probe"]).failure(1);
    assert!(message.contains("8 layers cannot have 9 stages; use 1 to 8"), "{message}");
    assert_eq!(call(&["plan", &model, "--stages", "0"]).code, Some(2));
    let small = call(&["plan", &model, "--stages", "2", "--memory", "5M", "--no-probe"]);
    assert_eq!(small.code, Some(1));
    assert!(small.stdout.contains("stage with layers 0..4"), "{}", small.stdout);
}
