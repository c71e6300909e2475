//! The program under test, and the files it is tested with.

#[allow(dead_code, reason = "the engine's tests use the rest")]
#[path = "../../../engine/tests/common/gguf_builder.rs"]
pub mod gguf_builder;
pub mod hub;
pub mod server;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A call of the program, with nothing on standard input.
pub fn forebay<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Whoever runs the tests may have settings.
    command.env("XDG_CONFIG_HOME", "/nonexistent");
    command
}

/// What a call gave.
#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Outcome {
        Outcome {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Outcome {
    /// The output of a call that succeeds and says nothing on stderr.
    #[track_caller]
    pub fn success(self) -> String {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{}", self.stdout);
        self.stdout
    }

    /// The one line on stderr of a call that fails and gives no output.
    #[track_caller]
    pub fn failure(self, code: i32) -> String {
        assert_eq!((self.code, self.stdout.as_str()), (Some(code), ""), "{}", self.stderr);
        assert_eq!(self.stderr.lines().count(), 1, "{}", self.stderr);
        self.stderr.strip_prefix("error: ").expect("an error says so").trim_end().to_owned()
    }
}

/// Runs a call to its end.
pub fn call(args: &[&str]) -> Outcome {
    forebay(args).output().unwrap().into()
}

/// Presses Ctrl-C. Comes back when the program has heard it: two that have not been heard are one.
pub fn interrupt(child: &Child) {
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    if !cfg!(target_os = "linux") {
        return std::thread::sleep(Duration::from_secs(1));
    }
    let start = Instant::now();
    // SIGINT is signal 2, and bit 1 of the mask.
    while signal_mask(child, "ShdPnd:").is_some_and(|pending| pending & 2 != 0) {
        assert!(start.elapsed() < Duration::from_secs(60), "Ctrl-C is not heard");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A mask of signals by its name in Linux; `None` when the program has ended.
pub fn signal_mask(child: &Child, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix(name))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

/// Runs a call with a text on standard input.
pub fn call_with_input(args: &[&str], input: &[u8]) -> Outcome {
    let mut child = forebay(args).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap().into()
}

pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

pub fn demo_model() -> String {
    text(&repository("models/tales-qwen3moe-Q4_K_M.gguf"))
}

pub fn golden(name: &str) -> String {
    text(&forebay_testing::golden(name))
}

pub fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// The GGUF files of a folder of test data that lies beside some checkouts; empty, with a message, elsewhere.
pub fn shared_models(folder: &str) -> Vec<PathBuf> {
    let Some(folder) = forebay_testing::shared(folder) else { return Vec::new() };
    let paths = std::fs::read_dir(&folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "gguf"));
    let paths: Vec<_> = paths.collect();
    assert!(!paths.is_empty(), "{} holds no model", folder.display());
    paths
}

/// The bytes of a GGUF file that asks for a BOS token, made of one that does not. The entry takes the place of
/// the end of the chat template, so that everything else stays where it is.
pub fn with_bos(model: &[u8]) -> Vec<u8> {
    let mut bytes = model.to_vec();
    let key = b"tokenizer.ggml.add_bos_token";
    // The key's length, the key, the type (bool is 7), the value.
    let entry = [&(key.len() as u64).to_le_bytes(), &key[..], &7_u32.to_le_bytes(), &[1]].concat();
    let name = b"tokenizer.chat_template";
    let length = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len() + 4;
    let number = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let template = number(&bytes, length);
    let end = length + 8 + template as usize;
    bytes[end - entry.len()..end].copy_from_slice(&entry);
    bytes[length..length + 8].copy_from_slice(&(template - entry.len() as u64).to_le_bytes());
    // The number of entries is at offset 16.
    let entries = number(&bytes, 16) + 1;
    bytes[16..24].copy_from_slice(&entries.to_le_bytes());
    bytes
}
