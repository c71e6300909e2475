//! Skipping tests that need something that not every machine has.

use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};

/// What a test may need beyond the checkout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Published models, vocabularies and templates, in `../shared` beside the checkout.
    Shared,
    /// Vectors that a script of `tools` makes from published files. An environment variable names their folder.
    Vectors,
    /// The program `tmux`, which provides a terminal.
    Tmux,
    /// A shell whose completions are tested.
    Shell,
    /// An I/O method that the system may refuse.
    Io,
    /// A GPU, or the emulator of `tools/gpu_emulator`.
    Gpu,
    /// A GPU that Metal or Vulkan can use, or a program in place of one.
    PortableGpu,
    /// A real GPU, not the emulator.
    RealGpu,
    /// The emulator, which can be told to fail.
    Emulator,
}

impl Need {
    const ALL: [Need; 9] = [
        Need::Shared,
        Need::Vectors,
        Need::Tmux,
        Need::Shell,
        Need::Io,
        Need::Gpu,
        Need::PortableGpu,
        Need::RealGpu,
        Need::Emulator,
    ];

    /// The name in [`NO_SKIPS`].
    fn name(self) -> &'static str {
        match self {
            Need::Shared => "shared",
            Need::Vectors => "vectors",
            Need::Tmux => "tmux",
            Need::Shell => "shell",
            Need::Io => "io",
            Need::Gpu => "gpu",
            Need::PortableGpu => "portable-gpu",
            Need::RealGpu => "real-gpu",
            Need::Emulator => "emulator",
        }
    }
}

/// An environment variable that lists, separated by commas, what this machine is known to have.
const NO_SKIPS: &str = "FOREBAY_NO_SKIPS";

/// Prints that a test, or a part of it, does not run, and why. The test then returns. Panics if `FOREBAY_NO_SKIPS`
/// names what is missing: a machine that must have it, such as the continuous integration, must not skip.
#[track_caller]
pub fn skipped(need: Need, why: impl Display) {
    if let Ok(names) = std::env::var(NO_SKIPS) {
        assert!(!is_named(need, &names), "{NO_SKIPS} names {:?}, but {why}", need.name());
    }
    // The test runner hides the output of `eprintln!` when a test passes. One write keeps the line whole.
    let _ = std::io::stderr().write_all(format!("skipped: {why}\n").as_bytes());
}

/// A file or folder of `../shared`, which some checkouts have beside them: published data, or too large for the
/// repository.
#[track_caller]
pub fn shared(name: &str) -> Option<PathBuf> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")).join(name);
    if !path.exists() {
        skipped(Need::Shared, format_args!("{} is not there", path.display()));
        return None;
    }
    Some(path)
}

/// The folder with what a script of `tools` made from published files, as named by an environment variable.
#[track_caller]
pub fn vectors(variable: &str, script: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable);
    if path.is_none() {
        skipped(Need::Vectors, format_args!("{variable} does not name what tools/{script} makes"));
    }
    path.map(PathBuf::from)
}

/// Whether the list contains this name. An unknown name panics, because it would let tests skip unnoticed.
#[track_caller]
fn is_named(need: Need, names: &str) -> bool {
    let mut named = false;
    for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let known = Need::ALL.into_iter().find(|need| need.name() == name);
        let known = known.unwrap_or_else(|| {
            let all = Need::ALL.map(Need::name).join(", ");
            panic!("{NO_SKIPS} names {name:?}; there are only {all}")
        });
        named |= known == need;
    }
    named
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_named_may_not_be_skipped() {
        assert!(is_named(Need::Shared, "shared") && is_named(Need::Vectors, "shared, vectors"));
        assert!(!is_named(Need::Gpu, "shared,real-gpu") && !is_named(Need::Shared, ""));
        assert!(Need::ALL.into_iter().all(|need| is_named(need, need.name())));
    }

    #[test]
    fn a_name_that_means_nothing_is_a_mistake() {
        assert!(std::panic::catch_unwind(|| is_named(Need::Shared, "shared,1")).is_err());
    }
}
