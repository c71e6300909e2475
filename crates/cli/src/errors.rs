//! Reports errors: one line that says what happened, where, and what to do; and the exit code.

use std::io::{self, ErrorKind};
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::path::Path;
use std::process::ExitCode;

use clap::error::ContextKind;
use forebay_engine::{Engine, Error};

use crate::inspect::Summary;
use crate::interrupt;

/// An error in the command line or the settings.
pub fn usage(message: impl std::fmt::Display) -> anyhow::Error {
    clap::Error::raw(clap::error::ErrorKind::ValueValidation, format!("{message}\n")).into()
}

/// A mistake in the command line, with a message of our own where clap's does not help.
pub fn in_plain_words(mut error: clap::Error) -> anyhow::Error {
    if error.kind() == clap::error::ErrorKind::UnknownArgument {
        // It advises to write an unknown flag after `--`, where it would be a prompt or a file name.
        error.remove(ContextKind::Suggested);
    }
    let Some(expected) = std::error::Error::source(&error).and_then(expected) else { return error.into() };
    let context = |kind| error.get(kind).map_or_else(String::new, |value| value.to_string());
    let (flag, value) = (context(ContextKind::InvalidArg), context(ContextKind::InvalidValue));
    // Other programs have -1 for "no limit" and for a random seed.
    let default = if value == "-1" { "; for the default, leave the flag out" } else { "" };
    usage(format!("invalid value '{value}' for '{flag}': {expected}{default}"))
}

/// What a flag expects instead of a value that is not a number.
pub fn expected(source: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(error) = source.downcast_ref::<ParseIntError>() {
        return Some(match error.kind() {
            IntErrorKind::PosOverflow => "the number is too large".into(),
            _ => "expected a whole number of 0 or more".into(),
        });
    }
    source.is::<ParseFloatError>().then(|| "expected a number, such as 0.7".into())
}

/// More tokens than the context holds.
#[derive(Debug)]
pub struct TooLong {
    tokens: usize,
    context: usize,
    /// The largest context of the model.
    most: u64,
}

impl std::error::Error for TooLong {}

impl std::fmt::Display for TooLong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let TooLong { tokens, context, most } = self;
        write!(f, "{tokens} tokens do not fit the context of {context}; ")?;
        if *most > *context as u64 {
            write!(f, "use a larger --ctx (up to {most} with this model), or a shorter text")
        } else {
            write!(f, "this is the model's maximum: use a shorter text")
        }
    }
}

/// An error of the engine, in terms of our flags.
pub fn explain(engine: &Engine, error: Error) -> anyhow::Error {
    // The field of the request is not needed: the user has just typed the request.
    match error.reason() {
        Error::Context { tokens, limit } => {
            let most = Summary::new(engine.file()).context.unwrap_or(0);
            TooLong { tokens, context: limit, most }.into()
        }
        error => error.into(),
    }
}

/// What messages of the engine and the server call the options of a library's caller, and the flags that set them. Longer names
/// come before those that they contain.
const FLAGS: [(&str, &str); 15] = [
    ("the server's option ServerOptions::timeout", "the server's flag --timeout"),
    ("ServerOptions::keys", "--api-key-file"),
    ("ServerOptions::max_body", "--max-body"),
    ("ServerOptions::origins", "--cors-origin"),
    ("ServerOptions::parallel", "--parallel"),
    ("ServerOptions::queue", "--queue"),
    ("ServerOptions::timeout", "--timeout"),
    ("Prompter::with_template", "--chat-template-file"),
    ("Options::device = None", "--device cpu"),
    ("Options::io = IoMethod::Pool", "--io pool"),
    ("Options::cpu_experts", "--cpu-experts"),
    ("Options::expert_memory", "--expert-memory"),
    ("Options::memory", "--memory"),
    ("Options::context", "--ctx"),
    ("the device's memory limit", "--vram"),
];

/// A message of the engine or the server, in terms of our flags.
pub fn in_flags(message: &str) -> String {
    FLAGS.iter().fold(message.to_owned(), |text, (option, flag)| text.replace(option, flag))
}

/// The engine's error, if it is one, also if the hub met it.
pub fn of_engine(error: &anyhow::Error) -> Option<&Error> {
    error.downcast_ref().or_else(|| match error.downcast_ref()? {
        forebay_hub::Error::Engine(error) => Some(error),
        _ => None,
    })
}

/// Reports an error on stderr.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if let Some(usage) = error.downcast_ref::<clap::Error>() {
        usage.exit();
    }
    if matches!(of_engine(error), Some(Error::Cancelled)) {
        return ExitCode::from(interrupt::EXIT_CODE);
    }
    // The reader of our output has closed it, as `head` does. That is not a failure.
    if error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) {
        return ExitCode::SUCCESS;
    }
    eprintln!("error: {}{}", message(error), advice(error));
    ExitCode::FAILURE
}

/// The error and its causes, without those that it quotes already.
pub fn message(error: &anyhow::Error) -> String {
    error.chain().map(|cause| in_flags(&cause.to_string())).fold(String::new(), |text, cause| {
        if text.is_empty() {
            cause
        } else if text.contains(&cause) {
            text
        } else {
            format!("{text}: {cause}")
        }
    })
}

/// What to do after an error of the operating system, whose message does not say that.
fn advice(error: &anyhow::Error) -> String {
    let file = of_engine(error).and_then(|error| match error {
        Error::Io { path, source, .. } => Some((path.as_path(), source)),
        _ => None,
    });
    let source =
        file.map(|(_, source)| source).or_else(|| error.chain().find_map(|cause| cause.downcast_ref()));
    let advice = match (source.map(io::Error::kind), file) {
        (Some(ErrorKind::NotFound), Some((path, _))) => what_is_there(path),
        (Some(ErrorKind::NotFound), None) => "is the path right?".into(),
        (Some(ErrorKind::PermissionDenied), _) => {
            "check the owner and the permissions with `ls -l`, or choose another place".into()
        }
        (Some(ErrorKind::StorageFull | ErrorKind::QuotaExceeded), _) => {
            "free some space on the drive, or choose another place".into()
        }
        _ => return String::new(),
    };
    format!("; {advice}")
}

/// The models in the folder of a file that does not exist.
fn what_is_there(path: &Path) -> String {
    let folder = match path.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => return "is the path right?".into(),
    };
    let Ok(entries) = std::fs::read_dir(folder) else {
        return format!("there is no folder {} either", folder.display());
    };
    let is_model = |path: &Path| {
        path.extension().is_some_and(|extension| extension == "gguf") || path.join("config.json").exists()
    };
    let models = entries.flatten().map(|entry| entry.path()).filter(|path| is_model(path));
    let mut models: Vec<_> =
        models.filter_map(|path| path.file_name()?.to_str().map(str::to_owned)).collect();
    // The file that the user meant probably begins with the same letters.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let alike = |other: &str| name.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
    models.sort_by(|a, b| alike(b).cmp(&alike(a)).then(a.cmp(b)));
    match &models[..] {
        [] => "is the path right? There are no models in its folder".into(),
        [first, rest @ ..] => {
            let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
            format!("its folder contains {first:?}{more}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_the_library_are_named_as_flags() {
        let lost = Error::DeviceLost(
            "the GPU cannot copy: gone; use Options::device = None to run on the CPU".into(),
        );
        assert_eq!(message(&lost.into()), "the GPU cannot copy: gone; use --device cpu to run on the CPU");
        for (option, flag) in FLAGS {
            assert_eq!(in_flags(option), flag);
        }
    }

    #[test]
    fn a_cause_that_is_quoted_already_is_not_repeated() {
        let cause = || std::io::Error::other("the disk is gone");
        let quoting = Error::io("model.gguf".as_ref(), "cannot open", cause());
        assert_eq!(message(&quoting.into()), "model.gguf: cannot open: the disk is gone");
        let silent = anyhow::Error::from(cause()).context("cannot write out");
        assert_eq!(message(&silent), "cannot write out: the disk is gone");
    }

    #[test]
    fn a_larger_context_is_advised_only_where_the_model_can_have_one() {
        let message = |most| TooLong { tokens: 12, context: 10, most }.to_string();
        assert!(
            message(1024).ends_with("use a larger --ctx (up to 1024 with this model), or a shorter text")
        );
        assert!(!message(10).contains("--ctx"));
    }
}
