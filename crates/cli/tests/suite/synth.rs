//! `forebay synth`: models of every family and type, whole or not at all.

use std::path::Path;
use std::process::Command;

use forebay_engine::internals::format::{DType, ModelFile};
use forebay_engine::internals::models::ARCHS;

use crate::common::{Outcome, call, forebay, text};

/// A small shape of any family.
fn tiny(family: &str) -> Vec<String> {
    let mut args = "--layers 4 --hidden 256 --inter 256 --vocab 300 --ctx 512".to_owned();
    args += match family {
        "qwen2" | "qwen3" | "llama" | "mistral3" | "qwen35" | "gemma3" | "granite" => "",
        "llama4" => " --experts 8 --top-k 1",
        _ => " --experts 8 --top-k 2",
    };
    args += match family {
        "deepseek2" => {
            " --heads 4 --set attention.kv_lora_rank=256 --set attention.key_length=320
              --set attention.value_length=256 --set feed_forward_length=512"
        }
        "mistral4" => {
            " --heads 4 --set attention.kv_lora_rank=256 --set attention.key_length=320
              --set attention.value_length=256"
        }
        // Their heads divide the hidden channels.
        "lfm2moe" | "granitemoe" | "granite" | "phimoe" => " --heads 4 --kv-heads 2",
        _ => " --heads 4 --kv-heads 2 --head-dim 64",
    };
    args += match family {
        "qwen35moe" | "qwen3next" => {
            " --set ssm.state_size=32 --set ssm.group_count=2 --set ssm.time_step_rank=4 --set ssm.inner_size=128
              --set expert_shared_feed_forward_length=256"
        }
        "qwen35" => {
            " --set ssm.state_size=32 --set ssm.group_count=2 --set ssm.time_step_rank=4 --set ssm.inner_size=128"
        }
        "granitemoe" | "granite" | "phimoe" => " --set rope.dimension_count=64",
        "mimo2" => " --set rope.dimension_count=22",
        "laguna" => " --set rope.dimension_count=32 --set rope.dimension_count_swa=64",
        "qwen2moe" => " --set expert_shared_feed_forward_length=512",
        "glm4moe" | "dots1" => " --set feed_forward_length=512",
        _ => "",
    };
    args.split_whitespace().map(str::to_owned).collect()
}

/// Writes a small model.
#[track_caller]
fn synth(path: &Path, family: &str, flags: &[&str]) -> Outcome {
    let mut args = vec!["synth".to_owned(), text(path), "--family".to_owned(), family.to_owned()];
    for flag in tiny(family).chunks(2).filter(|flag| !flags.contains(&flag[0].as_str())) {
        args.extend_from_slice(flag);
    }
    args.extend(flags.iter().map(|&flag| flag.to_owned()));
    forebay(args).output().unwrap().into()
}

/// Whether a model runs, with logits that are numbers.
#[track_caller]
fn runs(path: &Path) {
    let model = text(path);
    call(&["run", &model, "--raw", "-p", "x", "-n", "3", "--heat", "off"]).success();
    // The perplexity is refused if a logit is no number. That of one who guesses is that of the vocabulary or more.
    let file = path.with_extension("txt");
    std::fs::write(&file, "Any text is noise to it.").unwrap();
    let score = call(&["perplexity", &model, "-f", &text(&file), "--json", "--heat", "off"]).success();
    let score: serde_json::Value = serde_json::from_str(&score).unwrap();
    let perplexity = score["perplexity"].as_f64().unwrap();
    assert!((100.0..10_000.0).contains(&perplexity), "{perplexity}");
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_model_of_every_family_runs() {
    let folder = tempfile::tempdir().unwrap();
    for arch in ARCHS {
        let path = folder.path().join(format!("{}.gguf", arch.gguf));
        let said = synth(&path, arch.gguf, &["--type", "Q8_0"]).success();
        assert!(said.starts_with(&text(&path)), "{said}");
        let file = ModelFile::open(&path).unwrap();
        assert_eq!(file.architecture(), Some(arch.gguf));
        assert!(file.tensors.iter().filter(|t| t.name.contains("_exps.weight")).all(|t| t.shape[0] == 8));
        runs(&path);
    }
}

#[test]
fn routers_of_the_later_deepseeks_have_a_correction() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v3.gguf");
    let flags = "--type Q8_0 --set expert_gating_func=2 --set attention.q_lora_rank=96 --set expert_weights_scale=2.5";
    synth(&path, "deepseek2", &flags.split(' ').collect::<Vec<_>>()).success();
    let file = ModelFile::open(&path).unwrap();
    assert!(
        file.tensor("blk.1.exp_probs_b.bias").is_some() && file.tensor("blk.0.exp_probs_b.bias").is_none()
    );
    assert!(file.tensor("blk.0.attn_q_b.weight").is_some());
    runs(&path);
}

#[test]
fn every_type_that_can_be_computed_can_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for dtype in DType::computable() {
        synth(&path, "qwen3moe", &["--type", dtype.name(), "--force"]).success();
        let file = ModelFile::open(&path).unwrap();
        let kind = |name: &str| file.tensor(name).unwrap().dtype;
        assert_eq!(kind("blk.3.ffn_gate_exps.weight"), dtype);
        assert_eq!(kind("blk.0.ffn_gate_inp.weight"), DType::F32);
        let down = if dtype == DType::Q4_K { DType::Q6_K } else { dtype };
        assert_eq!([kind("blk.0.ffn_down_exps.weight"), kind("output.weight")], [down, down]);
        runs(&path);
    }
    let flags = ["--force", "--expert-type", "iq2_xs", "--down-type", "Q3_K", "--output-type", "f16"];
    synth(&path, "qwen3moe", &flags).success();
    let file = ModelFile::open(&path).unwrap();
    let kinds =
        ["blk.0.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight", "output.weight", "blk.0.attn_q.weight"]
            .map(|name| file.tensor(name).unwrap().dtype);
    assert_eq!(kinds, [DType::IQ2_XS, DType::Q3_K, DType::F16, DType::Q4_K]);
    runs(&path);
}

#[test]
fn a_type_that_does_not_fit_gives_way_and_that_is_said_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let outcome = synth(&path, "qwen3moe", &["--inter", "96"]);
    let note = "note: Q8_0 replaces Q6_K in matrices whose rows are not a whole number of Q6_K blocks\n";
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), note));
    runs(&path);
}

#[test]
fn the_seed_decides_the_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = |flags: &[&str]| {
        synth(&path, "qwen3moe", &[flags, &["--force"]].concat()).success();
        std::fs::read(&path).unwrap()
    };
    let first = bytes(&["--seed", "5"]);
    assert!(first == bytes(&["--seed", "5"]));
    let other = bytes(&["--seed", "6"]);
    assert_eq!(first.len(), other.len());
    assert!(first != other);
    assert!(first != bytes(&["--seed", "5", "--skew", "0"]));
}

#[test]
fn one_can_chat_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    synth(&path, "qwen3moe", &["--vocab", "2000"]).success();
    let model = text(&path);
    let answer =
        call(&["run", &model, "-p", "Grüße!\n", "-n", "8", "--seed", "1", "--heat", "off"]).success();
    assert!(!answer.trim().is_empty());
    let tokens = call(&["tokenize", &model, "--text", "a ß\t"]).success();
    assert_eq!(tokens.split_whitespace().filter(|word| word.parse::<u32>().is_ok()).count(), 5, "{tokens}");
}

#[test]
fn the_size_is_told_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let told = |flags: &[&str]| -> serde_json::Value {
        serde_json::from_str(&synth(&path, "qwen3moe", flags).success()).unwrap()
    };
    let before = told(&["--json", "--dry-run"]);
    assert_eq!(before["written"], false);
    assert!(names(folder.path()).is_empty());
    let after = told(&["--json"]);
    assert_eq!((&after["written"], &after["bytes"]), (&true.into(), &before["bytes"]));
    assert_eq!(after["bytes"], std::fs::metadata(&path).unwrap().len());
    assert_eq!(names(folder.path()), ["model.gguf"]);
}

#[test]
fn a_file_that_is_there_stays_unless_force_is_given() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, "precious").unwrap();
    let message = synth(&path, "qwen3moe", &[]).failure(1);
    assert!(message.starts_with(&text(&path)) && message.contains("--force"), "{message}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn what_cannot_be_written_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let message = synth(&folder.path().join("no/such.gguf"), "qwen3moe", &[]).failure(1);
    assert!(message.contains("no/such.gguf") && message.contains("No such file"), "{message}");
    let path = text(&folder.path().join("huge.gguf"));
    let huge = "--layers 2 --hidden 65536 --inter 65536 --experts 4096".split(' ');
    let message =
        Outcome::from(forebay(["synth", &path].into_iter().chain(huge)).output().unwrap()).failure(1);
    assert!(message.contains("TiB") && message.contains("free"), "{message}");
    assert!(names(folder.path()).is_empty());
}

/// A limit on the size of files is what comes nearest to a drive that fills up.
#[cfg(unix)]
#[test]
fn a_drive_that_fills_up_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "trap '' XFSZ; ulimit -f 512; exec {} synth {}/m.gguf --layers 2 --experts 8",
        env!("CARGO_BIN_EXE_forebay"),
        text(folder.path())
    );
    let message = Outcome::from(Command::new("sh").args(["-c", &script]).output().unwrap()).failure(1);
    assert!(message.contains("m.gguf: cannot write") && message.contains("File too large"), "{message}");
    assert!(names(folder.path()).is_empty());
}

#[cfg(unix)]
#[test]
fn control_c_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = text(&folder.path().join("m.gguf"));
    let child = forebay(["synth", &path, "--layers", "8"]).spawn().unwrap();
    while names(folder.path()).is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let outcome = Outcome::from(child.wait_with_output().unwrap());
    assert_eq!((outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()), (Some(130), "", ""));
    assert!(names(folder.path()).is_empty());
}

#[test]
fn shapes_that_make_no_sense_are_refused_by_name() {
    let calls: [(&[&str], &str); 10] = [
        (&["--family", "gpt-5"], "--family"),
        (&["--family", "qwen3", "--experts", "8"], "experts does not apply to"),
        (&["--family", "deepseek2", "--head-dim", "64"], "head-dim does not apply to"),
        (&["--top-k", "200"], "expert_used_count is larger"),
        (&["--heads", "7"], "head_count_kv does not divide"),
        (&["--type", "Q9_K"], "expected one of F32"),
        (&["--vocab", "100"], "--vocab"),
        (&["--skew", "-1"], "--skew"),
        (&["--set", "nothing"], "KEY=VALUE"),
        (&["--set", "block_count=100000"], "at most 256 layers"),
    ];
    for (flags, mention) in calls {
        let outcome = call(&[&["synth", "/never/written.gguf"], flags].concat());
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{flags:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(mention), "{flags:?}: {}", outcome.stderr);
    }
}

#[test]
fn help_fits_80_columns() {
    let help = Outcome::from(forebay(["synth", "--help"]).env("COLUMNS", "80").output().unwrap()).success();
    assert!(help.contains("Usage: forebay synth") && help.contains("Examples:"), "{help}");
    assert!(ARCHS.iter().all(|arch| help.contains(&format!("  {} ", arch.gguf))), "{help}");
    assert_eq!(help.lines().find(|line| line.chars().count() > 80), None);
}
