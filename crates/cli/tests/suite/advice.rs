//! The likeliest mistakes: each has a message that says what is wrong, where, and what to do.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::common::gguf_builder::GgufBuilder;
use crate::common::{Outcome, call, demo_model, forebay, golden, text};

/// What a message must say.
struct Expected<'a> {
    what: &'a str,
    place: &'a str,
    remedy: &'a str,
}

#[track_caller]
fn says(message: &str, expected: &Expected) {
    let Expected { what, place, remedy } = expected;
    for (kind, part) in [("what", what), ("where", place), ("what to do", remedy)] {
        assert!(!part.is_empty() && message.contains(part), "it does not say {kind} ({part:?}): {message}");
    }
}

/// The message of a model that cannot be run.
fn run(model: &Path, more: &[&str]) -> String {
    let model = text(model);
    call(&[&["run", &model, "-p", "Hi", "-n", "1"], more].concat()).failure(1)
}

/// Runs a file with these bytes in a folder of its own.
#[track_caller]
fn file(name: &str, bytes: impl AsRef<[u8]>, what: &str, remedy: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    says(&run(&path, &[]), &Expected { what, place: &text(&path), remedy });
}

/// A folder with a sound model in it, to be spoilt.
fn model_folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden("llama")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    folder
}

/// Runs a folder after `spoil`; the message must name `place` in it.
#[track_caller]
fn folder(spoil: impl FnOnce(&Path), what: &str, place: &str, remedy: &str) {
    let folder = model_folder();
    spoil(folder.path());
    let place: PathBuf = if place.is_empty() { folder.path().into() } else { folder.path().join(place) };
    says(&run(folder.path(), &[]), &Expected { what, place: &text(&place), remedy });
}

/// The bytes of a tiny model, with the type of one of its tensors changed to another of the same size.
fn with_type(type_id: u32) -> Vec<u8> {
    let mut bytes = fs::read(golden("qwen3moe.gguf")).unwrap();
    let name = b"blk.0.ffn_gate_inp.weight";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len();
    let dimensions = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let at = at + 4 + 8 * dimensions;
    bytes[at..at + 4].copy_from_slice(&type_id.to_le_bytes());
    bytes
}

#[test]
fn a_sound_copy_runs() {
    let folder = model_folder();
    assert_eq!(call(&["run", &text(folder.path()), "-p", "Hi", "-n", "1"]).code, Some(0));
}

#[test]
fn a_wrong_path() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("qwen3-30b-Q4_K_M.gguf"), "").unwrap();
    fs::write(folder.path().join("another.gguf"), "").unwrap();
    let path = folder.path().join("qwen3-30b-Q4.gguf");
    let remedy = "its folder contains \"qwen3-30b-Q4_K_M.gguf\" and 1 more";
    says(&run(&path, &[]), &Expected { what: "No such file", place: &text(&path), remedy });
    let path = folder.path().join("no/model.gguf");
    let remedy = format!("there is no folder {}/no either", folder.path().display());
    says(&run(&path, &[]), &Expected { what: "No such file", place: &text(&path), remedy: &remedy });
    let empty = tempfile::tempdir().unwrap();
    let path = empty.path().join("model.gguf");
    let remedy = "is the path right? There are no models in its folder";
    says(&run(&path, &[]), &Expected { what: "No such file", place: &text(&path), remedy });
}

#[test]
fn files_that_are_no_models() {
    let lfs = "version https://git-lfs.example/spec/v1\noid sha256:00\nsize 18556686912\n";
    file("model.gguf", lfs, "a Git LFS pointer", "git lfs pull");
    file("model.gguf", "<!DOCTYPE html><html><title>Sign in</title>", "a web page", "download it again");
    file(
        "model.gguf",
        "<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code>",
        "a web page",
        "download it again",
    );
    file(
        "pytorch_model.bin",
        b"PK\x03\x04\x00\x00",
        "a PyTorch checkpoint",
        "use the model's GGUF or safetensors",
    );
    file("model.bin", b"\x80\x02}q\x00.", "a PyTorch checkpoint", "use the model's GGUF or safetensors");
    file("paper.pdf", "%PDF-1.7\n%", "a PDF document", "name a GGUF file");
    file("model.gguf.gz", b"\x1f\x8b\x08\x00\x00", "a compressed archive", "unpack it");
    file("model.bin", b"tjgg\x03\0\0\0", "before GGUF", "convert the model again");
    file("notes.txt", "These are notes.", "not a GGUF file", "name a GGUF file, or a folder");
    file("model.gguf", [0; 4096], "starts with zeros", "download it again");
    file("model.gguf", "", "the file is empty", "download it again");
}

#[test]
fn a_truncated_download() {
    let whole = fs::read(golden("qwen3moe.gguf")).unwrap();
    file("model.gguf", &whole[..whole.len() - 1], "the file is incomplete", "download it again");
    file("model.gguf", &whole[..1000], "its last 976 bytes cannot hold", "download it again");
    file("model.gguf", &whole[..20], "truncated while reading", "download it again");
    let cut = |path: &Path| {
        let path = path.join("model.safetensors");
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    };
    folder(cut, "the file is incomplete", "model.safetensors", "download it again");
}

#[test]
fn a_part_that_is_missing() {
    let folder_ = tempfile::tempdir().unwrap();
    let path = |part| folder_.path().join(format!("model-0000{part}-of-00003.gguf"));
    let first = GgufBuilder::new().str("general.architecture", "qwen3moe").u16("split.no", 0);
    fs::write(path(1), first.u16("split.count", 3).i32("split.tensors.count", 0).build()).unwrap();
    let (what, remedy) = ("cannot open part 2 of 3 of a split model", "download all of them into one folder");
    says(&run(&path(1), &[]), &Expected { what, place: &text(&path(2)), remedy });

    let index = |path: &Path| {
        fs::remove_file(path.join("model.safetensors")).unwrap();
        let index = r#"{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}"#;
        fs::write(path.join("model.safetensors.index.json"), index).unwrap();
    };
    let remedy = "download all of them into its folder";
    folder(index, "cannot open a part of the model", "model-00001-of-00002.safetensors", remedy);
}

#[test]
fn folders_that_are_no_models() {
    let remove = |name: &'static str| move |path: &Path| fs::remove_file(path.join(name)).unwrap();
    folder(remove("model.safetensors"), "it has no safetensors files", "", "name a GGUF file, or a folder");
    folder(remove("config.json"), "it has no config.json", "", "download config.json and tokenizer.json");
    folder(remove("tokenizer.json"), "there is no tokenizer.json", "", "download it from where the weights");
    let pytorch = |path: &Path| {
        fs::rename(path.join("model.safetensors"), path.join("pytorch_model.bin")).unwrap();
    };
    folder(pytorch, "it has no safetensors files", "", "PyTorch's files are not supported: download");
    let two = |path: &Path| {
        fs::copy(path.join("model.safetensors"), path.join("a.safetensors")).unwrap();
        fs::rename(path.join("model.safetensors"), path.join("b.safetensors")).unwrap();
    };
    folder(two, "several safetensors files, but no model.safetensors.index.json", "", "download that");
    let gguf = |path: &Path| {
        fs::remove_dir_all(path).unwrap();
        fs::create_dir(path).unwrap();
        fs::write(path.join("tiny-Q4.gguf"), "").unwrap();
    };
    folder(gguf, "not a model's folder", "", "name one of them, such as");
    let cache = |path: &Path| {
        fs::remove_dir_all(path).unwrap();
        fs::create_dir_all(path.join("snapshots/0123")).unwrap();
    };
    folder(cache, "not a model's folder", "", "name a folder in its snapshots");
    let nested = |path: &Path| {
        fs::create_dir(path.join("model")).unwrap();
        fs::rename(path.join("config.json"), path.join("model/config.json")).unwrap();
    };
    folder(nested, "not a model's folder", "", "a folder in it has one");
}

#[test]
fn a_folder_with_damaged_files() {
    let pointer = "version https://git-lfs.example/spec/v1\noid sha256:00\nsize 281336\n";
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        folder(
            |path| fs::write(path.join(name), pointer).unwrap(),
            "a Git LFS pointer",
            name,
            "git lfs pull",
        );
    }
    let cut = |name: &'static str| {
        move |path: &Path| {
            let whole = fs::read(path.join(name)).unwrap();
            fs::write(path.join(name), &whole[..whole.len() / 2]).unwrap();
        }
    };
    folder(cut("tokenizer.json"), "not a tokenizer", "tokenizer.json", "download it again");
    folder(cut("config.json"), "it is not a JSON object", "config.json", "download it again");
}

#[test]
fn weights_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    fs::copy(golden("llama/model.safetensors"), &path).unwrap();
    let remedy = "download config.json and tokenizer.json";
    says(&run(&path, &[]), &Expected { what: "no config.json", place: &text(folder.path()), remedy });
}

#[test]
fn what_is_not_supported() {
    let unknown = GgufBuilder::new().str("general.architecture", "rwkv9").build();
    file(
        "model.gguf",
        unknown,
        "architecture \"rwkv9\" is not supported",
        "use a model of one of these: qwen3moe",
    );
    let (i32_type, removed) = (26, 31);
    file(
        "model.gguf",
        with_type(i32_type),
        "ffn_gate_inp.weight has type I32",
        "use a file with one of these types: F32",
    );
    file("model.gguf", with_type(removed), "(Q4_0_4_4), which was removed", "quantise it again");
    let awq = |path: &Path| {
        let mut config: serde_json::Value =
            serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap();
        config["quantization_config"] = serde_json::json!({ "quant_method": "awq" });
        fs::write(path.join("config.json"), config.to_string()).unwrap();
    };
    folder(awq, "quantised with \"awq\"", "config.json", "supported are unquantised weights");
    let version = fs::read(golden("qwen3moe.gguf")).map(|mut bytes| {
        bytes[4] = 1;
        bytes
    });
    file("model.gguf", version.unwrap(), "GGUF version 1", "convert it again");
}

#[test]
fn a_vocabulary_that_is_missing() {
    let mut bytes = fs::read(golden("qwen3moe.gguf")).unwrap();
    let key = b"tokenizer.ggml.tokens";
    let at = bytes.windows(key.len()).position(|w| w == key).unwrap();
    bytes[at..at + 3].copy_from_slice(b"xxx");
    file("model.gguf", bytes, "the key tokenizer.ggml.tokens is missing", "convert the model again");
}

#[test]
fn too_little_memory() {
    let message = run(Path::new(&demo_model()), &["--memory", "10M"]);
    says(
        &message,
        &Expected { what: "but 10.0 MiB is available", place: "dense weights", remedy: "--memory" },
    );
    let message = run(Path::new(&demo_model()), &["--expert-memory", "1K"]);
    says(
        &message,
        &Expected { what: "but 1.0 KiB is available", place: "experts", remedy: "--expert-memory to" },
    );
}

#[test]
fn too_long_a_text_or_context() {
    let message = run(Path::new(&demo_model()), &["--ctx", "4"]);
    says(
        &message,
        &Expected { what: "do not fit the context of 4", place: "tokens", remedy: "a larger --ctx" },
    );
    let message = run(Path::new(&demo_model()), &["--ctx", "100000"]);
    says(&message, &Expected { what: "100000", place: "maximum of 1024", remedy: "lower --ctx" });
}

#[test]
fn a_place_that_cannot_be_written() {
    let model = golden("qwen3moe.gguf");
    let logits = |out: &str| call(&["logits", &model, "--tokens", "1", "--out", out]).failure(1);
    let remedy = "is the path right?";
    let place = "no/such/folder/out";
    says(&logits(place), &Expected { what: "No such file", place, remedy });
    #[cfg(target_os = "linux")]
    says(
        &logits("/dev/full"),
        &Expected { what: "No space left", place: "/dev/full", remedy: "free some space on the drive" },
    );
}

/// The superuser may read everything, so the program runs as somebody else, from where everybody may run it.
#[cfg(target_os = "linux")]
#[test]
fn a_file_that_may_not_be_read() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::process::CommandExt;

    const NOBODY: u32 = 65534;
    let folder = tempfile::tempdir().unwrap();
    let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    set(folder.path(), 0o755);
    let model = folder.path().join("model.gguf");
    fs::write(&model, "GGUF").unwrap();
    set(&model, 0o000);
    let mut command = forebay(["run", &text(&model), "-p", "Hi"]);
    if fs::metadata("/proc/self").unwrap().uid() == 0 {
        let program = folder.path().join("forebay");
        // By another process: a child that a test beside this one starts would keep the file open for writing, and what is
        // being written cannot be run.
        let copied = std::process::Command::new("cp").arg(command.get_program()).arg(&program).status();
        assert!(copied.unwrap().success());
        set(&program, 0o755);
        let args: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        command = std::process::Command::new(program);
        command.args(args).uid(NOBODY).current_dir("/").stdin(std::process::Stdio::null());
    }
    let message = Outcome::from(command.output().unwrap()).failure(1);
    says(
        &message,
        &Expected {
            what: "Permission denied",
            place: &text(&model),
            remedy: "check the owner and the permissions",
        },
    );
}

#[test]
fn wrong_values_of_flags() {
    let cases = [
        ("--memory", "lots", "expected a size, such as 8G"),
        ("--expert-memory", "130%", "expected a percentage above 0 and up to 100"),
        ("--policy", "best", "possible values: lru, lfu, forecast"),
        ("--io", "fast", "uring"),
        ("--threads", "two", "not a whole number"),
        ("--heat", "maybe", "possible values: on, off"),
        ("--logit-bias", "cat", "expected ID=BIAS, such as 15=-2.5"),
        ("--temp", "-1", "must be"),
    ];
    for (flag, value, remedy) in cases {
        let outcome = call(&["run", "-p", "Hi", flag, value]);
        assert_eq!(outcome.code, Some(2), "{}", outcome.stderr);
        let place = if flag == "--temp" { "temperature" } else { flag };
        says(&outcome.stderr, &Expected { what: value, place, remedy });
    }
    // A slip of the finger is put right.
    let outcome = call(&["run", "--memroy", "8G"]);
    says(&outcome.stderr, &Expected { what: "unexpected", place: "'--memroy'", remedy: "'--memory'" });
    let outcome = call(&["inspekt", "model.gguf"]);
    says(&outcome.stderr, &Expected { what: "unrecognized", place: "'inspekt'", remedy: "'inspect'" });
}
