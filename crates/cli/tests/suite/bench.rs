//! `bench`: the shapes of its results. How fast anything is, is not tested.

use serde_json::{Value, json};

use crate::common::{call, demo_model, golden, text};

fn bench(more: &[&str]) -> String {
    let model = golden("qwen3moe.gguf");
    call(&[&["bench", &model, "-n", "4", "--threads", "2"], more].concat()).success()
}

/// What llama-bench calls its fields, as far as they mean the same. It has `n_prompt` and `n_gen`, too.
const LLAMA_BENCH: [&str; 13] = [
    "model_filename",
    "model_type",
    "model_size",
    "model_n_params",
    "n_threads",
    "n_depth",
    "test_time",
    "avg_ns",
    "stddev_ns",
    "avg_ts",
    "stddev_ts",
    "samples_ns",
    "samples_ts",
];

const FIELDS: [&str; 32] = [
    "model",
    "architecture",
    "size",
    "params",
    "backend",
    "precision",
    "threads",
    "test",
    "n_prompt",
    "n_gen",
    "depth",
    "parallel",
    "repetitions",
    "avg",
    "stddev",
    "median",
    "bytes_per_token",
    "gb_per_s",
    "read_gb_per_s",
    "bandwidth_share",
    "cache",
    "hit_rate",
    "gpu_hit_rate",
    "lifted_bytes_per_token",
    "link_gb_per_s",
    "drive_bytes_per_token",
    "dense_seconds",
    "wait_seconds",
    "drive_gb_per_s",
    "bound_by",
    "bound",
    "bound_share",
];

#[test]
fn a_table_has_a_row_for_each_test() {
    let table = bench(&["-p", "8", "-r", "1", "-d", "0,16"]);
    let (table, note) = table.split_once("\n\n").unwrap();
    assert!(note.starts_with("RAM read bandwidth: ") && note.ends_with(" GB/s with 2 threads\n"));
    let lines: Vec<_> = table.lines().collect();
    assert!(lines.iter().all(|l| l.chars().count() == lines[0].chars().count()), "{table}");
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let titles = "model,size,params,backend,threads,test,t/s,bytes/token,GB/s,% of RAM bandwidth,cache,cache hits,drive/token,% of the limit";
    assert_eq!(cells(lines[0]).join(","), titles);
    let tests: Vec<_> = lines[2..].iter().map(|line| cells(line)[5].clone()).collect();
    assert_eq!(tests, ["pp8", "tg4", "pp8 @ d16", "tg4 @ d16"]);
    for line in &lines[2..] {
        let cells = cells(line);
        let speed: f64 = cells[6].strip_suffix(" ± 0.00").unwrap().parse().unwrap();
        assert!(speed > 0.0);
        // Only where each token is computed alone is there a number of bytes for it.
        let writing = cells[5].starts_with("tg");
        assert!(cells[7..10].iter().all(|cell| cell.is_empty() != writing), "{line}");
        assert_eq!((cells[4].as_str(), cells[10].as_str()), ("2", "warm"));
    }
}

#[test]
fn csv_has_a_header_and_a_line_for_each_test() {
    let text = bench(&["-p", "8", "-r", "1", "-o", "csv"]);
    let lines: Vec<Vec<_>> = text.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert_eq!(lines[0], FIELDS);
    assert!(lines.iter().all(|line| line.len() == FIELDS.len()), "{text}");
    assert_eq!((lines[1][7], lines[1][16], lines[2][7]), ("pp8", "", "tg4"));
}

#[test]
fn json_has_every_number() {
    let rows: Vec<Value> =
        serde_json::from_str(&bench(&["-p", "8", "-r", "3", "-o", "json", "-d", "16"])).unwrap();
    let names: Vec<_> = rows[0].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, [&FIELDS[..], &["samples"], &LLAMA_BENCH].concat());
    let [prompt, answer] = &rows[..] else { panic!("{rows:?}") };
    for (row, name, lengths) in [(prompt, "pp8 @ d16", [8, 0]), (answer, "tg4 @ d16", [0, 4])] {
        assert_eq!(row["test"], name);
        assert_eq!(
            [&row["n_prompt"], &row["n_gen"], &row["depth"]],
            [&json!(lengths[0]), &json!(lengths[1]), &json!(16)]
        );
        let samples: Vec<f64> =
            row["samples"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
        assert_eq!((samples.len(), &row["repetitions"]), (3, &json!(3)));
        let mean = samples.iter().sum::<f64>() / 3.0;
        assert!((row["avg"].as_f64().unwrap() / mean - 1.0).abs() < 1e-9);
        assert!(samples.contains(&row["median"].as_f64().unwrap()));
        assert!(row["read_gb_per_s"].as_f64().unwrap() > 0.0);

        let same = [
            ("model_size", "size"),
            ("model_n_params", "params"),
            ("n_threads", "threads"),
            ("n_depth", "depth"),
            ("avg_ts", "avg"),
            ("stddev_ts", "stddev"),
            ("samples_ts", "samples"),
        ];
        assert!(same.iter().all(|(theirs, ours)| row[theirs] == row[ours]), "{row}");
        assert_eq!(row["model_filename"], golden("qwen3moe.gguf"));
        assert!(row["test_time"].as_str().unwrap().ends_with('Z'), "{row}");
        let tokens = lengths[0] + lengths[1];
        let seconds: Vec<f64> =
            row["samples_ns"].as_array().unwrap().iter().map(|ns| ns.as_f64().unwrap() / 1e9).collect();
        let rates = seconds.iter().map(|seconds| f64::from(tokens) / seconds);
        assert!(rates.zip(&samples).all(|(rate, sample)| (rate / sample - 1.0).abs() < 1e-3), "{row}");
        let mean = seconds.iter().sum::<f64>() / 3.0;
        assert!((row["avg_ns"].as_f64().unwrap() / 1e9 / mean - 1.0).abs() < 1e-3, "{row}");
    }
    assert_eq!(prompt["bytes_per_token"], Value::Null);
    let [bytes, speed] = ["bytes_per_token", "avg"].map(|key| answer[key].as_f64().unwrap());
    assert!((answer["gb_per_s"].as_f64().unwrap() / (bytes * speed / 1e9) - 1.0).abs() < 1e-9);

    // Keys and values of one position take twice the bytes in f32, and two positions more than one.
    let written = |more: &[&str]| {
        let text = bench(&[&["-p", "0", "-r", "1", "-o", "jsonl"], more].concat());
        let row: Value = serde_json::from_str(&text).unwrap();
        row["bytes_per_token"].as_u64().unwrap()
    };
    let position = written(&["-d", "17"]) - written(&["-d", "16"]);
    let exact = written(&["-d", "17", "--exact"]) - written(&["-d", "16", "--exact"]);
    assert!(position > 0 && exact == 2 * position, "{position} {exact}");
}

/// More answers than tokens of one, too.
#[test]
fn several_answers_are_written_together() {
    let text = bench(&["-p", "0", "-r", "1", "-d", "0,3", "--parallel", "1,9", "-o", "json"]);
    let rows: Vec<Value> = serde_json::from_str(&text).unwrap();
    let tests: Vec<_> = rows.iter().map(|row| (row["test"].as_str().unwrap(), &row["parallel"])).collect();
    let [one, nine] = [json!(1), json!(9)];
    assert_eq!(tests, [("tg4", &one), ("tg4 x9", &nine), ("tg4 @ d3", &one), ("tg4 x9 @ d3", &nine)]);
    for row in rows {
        // Answers share what they read, so there is no number of bytes for a token.
        assert_eq!(row["bytes_per_token"].is_null(), row["parallel"] == nine, "{row}");
        assert!(row["avg"].as_f64().unwrap() > 0.0);
    }
    let message = call(&["bench", &golden("qwen3moe.gguf"), "--parallel", "100000"]).failure(2);
    assert!(message.contains("--parallel"), "{message}");
}

#[test]
fn tokens_can_come_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = text(&folder.path().join("tokens"));
    std::fs::write(&file, "[1, 2]\n3 4\n").unwrap();
    let lines = bench(&["-p", "8", "-r", "1", "-o", "jsonl", "--tokens", &file]);
    assert_eq!(lines.lines().count(), 2);
    assert!(lines.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));

    let refused = |more: &[&str], code| {
        call(&[&["bench", &demo_model(), "-n", "0", "-p", "4", "-r", "1"], more].concat()).failure(code)
    };
    std::fs::write(&file, "1 99999").unwrap();
    let message = refused(&["--tokens", &file], 1);
    assert_eq!(message, format!("{file}: token 99999 is not in the vocabulary of 4096 tokens"));
    std::fs::write(&file, "1 one").unwrap();
    assert!(refused(&["--tokens", &file], 1).starts_with(&format!("{file}: \"one\" is not a token number")));
    std::fs::write(&file, "\n").unwrap();
    assert_eq!(refused(&["--tokens", &file], 2), format!("{file} contains no tokens"));
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let message = call(&["bench", &demo_model(), "-p", "0", "-n", "0"]).failure(2);
    assert!(message.starts_with("there is nothing to measure"), "{message}");
    let message = call(&["bench", &demo_model(), "-d", "1024"]).failure(1);
    assert!(message.contains("a context of 1536 tokens is longer"), "{message}");
}

/// Where experts are streamed, the first run is a row of its own, and the rows say what came from the drive.
#[test]
fn streaming_has_cold_and_warm_rows_and_a_bound() {
    let text = bench(&["-p", "0", "-r", "2", "-o", "json", "--expert-memory", "25%", "--heat", "off"]);
    let rows: Vec<Value> = serde_json::from_str(&text).unwrap();
    let [cold, warm] = &rows[..] else { panic!("{text}") };
    assert_eq!((&cold["cache"], &cold["repetitions"]), (&json!("cold"), &json!(1)));
    assert_eq!((&warm["cache"], &warm["repetitions"]), (&json!("warm"), &json!(2)));
    for row in &rows {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"));
        assert!((0.0..1.0).contains(&number("hit_rate")));
        assert!(number("drive_bytes_per_token") > 0.0 && number("drive_gb_per_s") > 0.0);
        assert!((number("bound_share") - number("avg") / number("bound")).abs() < 1e-9);
    }
}
