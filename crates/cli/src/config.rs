//! The settings file: defaults for flags, under the flags' names.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, CommandFactory, FromArgMatches, Id, Parser};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::args::{ComputeArgs, LoadArgs, ModelArgs, SamplingArgs};
use crate::serve::ServeArgs;
use crate::{GENERAL, errors, foreign};

/// The settings that a file may contain: those of a machine and its user, not those of a single request. These are the
/// names in the code; a file may use them, or the names of the flags, which have hyphens.
const SETTINGS: [&str; 31] = [
    "model",
    "memory",
    "expert_memory",
    "threads",
    "device",
    "vram",
    "ctx",
    "io",
    "policy",
    "prefetch",
    "heat",
    "temp",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_last_n",
    "host",
    "port",
    "alias",
    "parallel",
    "queue",
    "max_body",
    "timeout",
    "drain",
    "api_key_file",
    "prefix_cache",
    "prefix_memory",
    "prefix_disk",
];

/// Settings that are paths, in which `~/` stands for the home folder.
const PATHS: [&str; 2] = ["model", "api_key_file"];

/// The value of `--print-config` without a value.
pub const SHOW_SETTINGS: &str = "settings";

/// The flags for settings.
#[derive(Args)]
pub struct ConfigArgs {
    /// Settings file [default: ~/.config/forebay/config.toml, if it exists]
    #[arg(long, value_name = "FILE", global = true, display_order = 1001, help_heading = GENERAL)]
    config: Option<PathBuf>,
    /// Print the settings in effect and where each comes from, and exit
    // A text and not a switch, because `serve` lets it take a value: the client to configure.
    #[arg(long, global = true, display_order = 1002, num_args = 0, default_missing_value = SHOW_SETTINGS,
        help_heading = GENERAL)]
    print_config: Option<String>,
}

/// A command line whose defaults come from the settings file.
pub struct Parsed<C> {
    /// The arguments in effect.
    pub cli: C,
    /// The output of `--print-config`, if it was given.
    pub shown: Option<String>,
}

/// Reads the command line, and the settings file if the command has any of its settings.
pub fn parse<C: Parser>() -> Result<Parsed<C>> {
    // A negative number is a value: clap would look for a flag of that name.
    let program = C::command().mut_subcommands(|command| command.allow_negative_numbers(true));
    let line: Vec<_> = std::env::args_os().collect();
    if let Some(instead) = foreign::explain(&program, &line) {
        return Err(errors::usage(instead));
    }
    let matches = program.clone().try_get_matches().map_err(errors::in_plain_words)?;
    let args = ConfigArgs::from_arg_matches(&matches)?;
    let mut command = match matches.subcommand_name() {
        Some(name) => program.find_subcommand(name).expect("clap has found it").clone(),
        None => Settings::command(),
    };
    let concerned = settings_of(&command).next().is_some();
    let file = if concerned || args.config.is_some() { File::find(args.config.as_deref())? } else { None };
    // A model after --model replaces that of the file, too.
    let named =
        matches.subcommand().is_some_and(|(_, own)| own.try_contains_id("model_flag").unwrap_or(false));
    for entry in file.iter().flat_map(|file| &file.entries) {
        if !(named && entry.key == "model") {
            command = entry.as_default(command);
        }
    }
    let (cli, shown) = match matches.subcommand_name() {
        Some(name) => {
            let program = program.mut_subcommand(name, |_| command.clone());
            let matches = program.try_get_matches().map_err(errors::in_plain_words)?;
            let own = matches.subcommand_matches(name).expect("it is the same command line");
            (C::from_arg_matches(&matches)?, show(&command, own, file.as_ref()))
        }
        None => {
            let own = command.clone().get_matches_from(None::<&str>);
            (C::from_arg_matches(&matches)?, show(&command, &own, file.as_ref()))
        }
    };
    Ok(Parsed { cli, shown: args.print_config.filter(|what| what == SHOW_SETTINGS).map(|_| shown) })
}

/// Every setting as a flag, for checking the values of a file. The server has all of them.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct Settings {
    #[command(flatten)]
    serve: ServeArgs,
}

/// A file of settings.
struct File {
    path: PathBuf,
    entries: Vec<Entry>,
}

/// One setting of a file.
struct Entry {
    key: &'static str,
    /// The value as on a command line.
    value: String,
    line: usize,
}

impl File {
    /// The given file, or the one in the usual place if it exists.
    fn find(named: Option<&Path>) -> Result<Option<File>> {
        let path = match (named, usual_path()) {
            (Some(path), _) => path.to_owned(),
            (None, Some(path)) if path.exists() => path,
            (None, _) => return Ok(None),
        };
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read the settings in {}", path.display()))?;
        match parse_entries(&text) {
            Ok(entries) => Ok(Some(File { path, entries })),
            Err(wrong) => {
                Err(errors::usage(format!("{}, line {}: {}", path.display(), wrong.line, wrong.what)))
            }
        }
    }
}

impl Entry {
    /// The command with this setting as a default, if it has the setting.
    fn as_default(&self, command: Command) -> Command {
        if settings_of(&command).any(|arg| arg.get_id() == self.key) {
            command.mut_arg(self.key, |arg| arg.default_value(self.value.clone()))
        } else {
            command
        }
    }

    fn check(&self) -> Result<(), String> {
        let flag = format!("--{}={}", flag_name(self.key), self.value);
        let settings = Settings::try_parse_from([flag]).map_err(|error| reason(&error))?;
        settings.serve.refusal().map_or(Ok(()), |error| Err(error.to_string()))
    }
}

/// Why clap refuses a value.
fn reason(error: &clap::Error) -> String {
    if let Some(source) = std::error::Error::source(error) {
        return errors::expected(source).unwrap_or_else(|| source.to_string());
    }
    match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(values)) if !values.is_empty() => {
            format!("expected {}", values.join(", "))
        }
        _ => "it needs a value".into(),
    }
}

/// A setting as the name of a flag.
fn flag_name(key: &str) -> String {
    key.replace('_', "-")
}

/// An error in a file.
#[derive(Debug, PartialEq)]
struct Wrong {
    line: usize,
    what: String,
}

fn parse_entries(text: &str) -> Result<Vec<Entry>, Wrong> {
    let line = |offset: usize| 1 + text.as_bytes()[..offset].iter().filter(|&&b| b == b'\n').count();
    let table = DeTable::parse(text).map_err(|error| Wrong {
        line: line(error.span().map_or(0, |span| span.start)),
        what: error.message().replace('\n', ", "),
    })?;
    let mut entries = Vec::new();
    for (name, value) in table.get_ref() {
        let line = line(name.span().start);
        let wrong = |what| Wrong { line, what };
        let name: &str = name.get_ref();
        let Some(key) = SETTINGS.into_iter().find(|key| *key == name || flag_name(key) == name) else {
            let known = SETTINGS.map(flag_name).join(", ");
            return Err(wrong(format!("there is no setting {name:?}; the settings are {known}")));
        };
        if entries.iter().any(|entry: &Entry| entry.key == key) {
            return Err(wrong(format!("{name} is set twice")));
        }
        let written = &text[value.span()];
        let Some(value) = in_a_call(key, value) else {
            return Err(wrong(format!("{name} = {written}: expected a text, a number, true or false")));
        };
        let entry = Entry { key, value, line };
        entry.check().map_err(|reason| wrong(format!("{name} = {written}: {reason}")))?;
        entries.push(entry);
    }
    entries.sort_by_key(|entry| entry.line);
    Ok(entries)
}

/// A value as on a command line; `None` for lists and tables.
fn in_a_call(key: &str, value: &Spanned<DeValue>) -> Option<String> {
    match value.get_ref() {
        DeValue::String(text) if PATHS.contains(&key) => match (text.strip_prefix("~/"), home()) {
            (Some(rest), Some(home)) => Some(home.join(rest).to_str()?.to_owned()),
            _ => Some(text.to_string()),
        },
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => {
            Some(i64::from_str_radix(number.as_str(), number.radix()).ok()?.to_string())
        }
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        DeValue::Boolean(true) => Some("on".into()),
        DeValue::Boolean(false) => Some("off".into()),
        _ => None,
    }
}

/// The arguments of a command that a file may set. They must come from the flags that commands share: another flag
/// may have the name of a setting by chance.
fn settings_of(command: &Command) -> impl Iterator<Item = &Arg> {
    SETTINGS.into_iter().filter_map(move |key| {
        let arg = command.get_arguments().find(|arg| arg.get_id() == key)?;
        command.get_groups().any(|group| Some(group.get_id()) == owner(key).as_ref()).then_some(arg)
    })
}

/// The name of clap's group for the struct that has this setting.
fn owner(key: &str) -> Option<Id> {
    fn of<A: Args>(key: &str) -> Option<Id> {
        let command = A::augment_args(Command::new(""));
        command.get_arguments().any(|arg| arg.get_id() == key).then(A::group_id)?
    }
    // The first is a part of the second, and the last contains all others.
    of::<ComputeArgs>(key)
        .or_else(|| of::<LoadArgs>(key))
        .or_else(|| of::<SamplingArgs>(key))
        .or_else(|| of::<ModelArgs>(key))
        .or_else(|| of::<ServeArgs>(key))
}

/// The settings in effect, in the format of a settings file.
fn show(command: &Command, matches: &ArgMatches, file: Option<&File>) -> String {
    let place = match file {
        Some(file) => format!("file: {}", file.path.display()),
        None => {
            usual_path().map_or("no file".into(), |path| format!("no file; it would be {}", path.display()))
        }
    };
    let mut text = format!("# {place}\n");
    for arg in settings_of(command) {
        let key = arg.get_id().as_str();
        let name = flag_name(key);
        let value = matches.get_raw(key).and_then(|mut values| values.next());
        let Some(value) = value.map(|value| value.to_string_lossy()) else {
            let default = default_in_words(arg).map_or_else(String::new, |words| format!(": {words}"));
            text.push_str(&format!("# {name} is not set{default}\n"));
            continue;
        };
        let entry = file.and_then(|file| file.entries.iter().find(|entry| entry.key == key));
        let origin = match (matches.value_source(key), entry) {
            (Some(ValueSource::CommandLine), _) => "the command line".into(),
            (_, Some(entry)) => format!("the file, line {}", entry.line),
            (_, None) => "default".into(),
        };
        let assignment = format!("{name} = {}", as_toml(&value));
        text.push_str(&format!("{assignment:<32}# {origin}\n"));
    }
    text
}

/// The default in the help of an argument.
fn default_in_words(arg: &Arg) -> Option<String> {
    let help = arg.get_help()?.to_string();
    let (_, words) = help.split_once("[default: ")?;
    Some(words.trim_end().strip_suffix(']')?.replace('\n', " "))
}

fn as_toml(value: &str) -> String {
    let is_number = value.parse::<i64>().is_ok() || (value.contains('.') && value.parse::<f64>().is_ok());
    if is_number { value.to_owned() } else { serde_json::Value::from(value).to_string() }
}

/// The usual place of the settings file.
fn usual_path() -> Option<PathBuf> {
    let folder = variable("XDG_CONFIG_HOME").or_else(|| Some(home()?.join(".config")));
    Some(folder.or_else(|| variable("APPDATA"))?.join("forebay").join("config.toml"))
}

fn home() -> Option<PathBuf> {
    variable("HOME")
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_flags_with_hyphens_or_underscores() {
        let keys = |text: &str| -> Vec<_> { parse_entries(text).unwrap().iter().map(|e| e.key).collect() };
        assert_eq!(
            keys("top-k = 3\nport = 9000\nprefix-cache = \"memory\""),
            ["top_k", "port", "prefix_cache"]
        );
        assert_eq!(keys("top_k = 3\nexpert_memory = \"30%\""), ["top_k", "expert_memory"]);
        let wrong = parse_entries("top-k = 3\ntop_k = 3").map(|_| ()).unwrap_err();
        assert_eq!((wrong.line, wrong.what.contains("is set twice")), (2, true), "{wrong:?}");
    }

    #[test]
    fn every_setting_is_a_flag() {
        let command = Settings::command();
        assert_eq!(settings_of(&command).count(), SETTINGS.len());
    }

    #[test]
    fn values_are_those_of_flags() {
        let text =
            "memory = \"8G\"\n\n# a comment\nthreads = 0x4\nprefetch = true\nheat = \"off\"\ntemp = 0.5\n";
        let entries = parse_entries(text).unwrap();
        let seen: Vec<_> = entries.iter().map(|e| (e.key, e.value.as_str(), e.line)).collect();
        let expected = [
            ("memory", "8G", 1),
            ("threads", "4", 4),
            ("prefetch", "on", 5),
            ("heat", "off", 6),
            ("temp", "0.5", 7),
        ];
        assert_eq!(seen, expected);
        assert!(parse_entries("").unwrap().is_empty());
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let cases = [
            (
                "\nmemry = 1",
                2,
                "there is no setting \"memry\"; the settings are model, memory, expert-memory",
            ),
            ("memory = \"lots\"", 1, "memory = \"lots\": expected a size, such as 8G or 512M"),
            ("threads = 0", 1, "threads = 0: at least 1 is needed"),
            ("threads = -4", 1, "threads = -4: not a whole number"),
            ("heat = 1", 1, "heat = 1: expected on, off"),
            ("policy = \"best\"", 1, "policy = \"best\": expected lru, lfu, forecast"),
            ("memory = 6", 1, "memory = 6: 6 bytes is too small; did you mean 6G?"),
            ("port = 70000", 1, "port = 70000: "),
            ("top-k = \"some\"", 1, "top-k = \"some\": expected a whole number of 0 or more"),
            ("\n\ntop_p = 2", 3, "top_p = 2: top_p is 2, but must be"),
            ("temp = nan", 1, "temp = nan: temperature is NaN"),
            ("temp = [1]", 1, "temp = [1]: expected a text, a number"),
            ("[sampling]\ntemp = 1", 1, "there is no setting \"sampling\""),
            ("model = \"\"", 1, "model = \"\": it needs a value"),
            ("threads = 1\nthreads = 2", 2, "duplicate key"),
            ("threads 1", 1, "key"),
            ("memory = 8G", 1, ""),
        ];
        for (text, line, what) in cases {
            let wrong = parse_entries(text).map(|_| ()).unwrap_err();
            assert_eq!(wrong.line, line, "{text}: {wrong:?}");
            assert!(wrong.what.contains(what), "{text}: {wrong:?}");
        }
    }
}
