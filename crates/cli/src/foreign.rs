//! Commands and flags of other programs that mean nothing here: what Forebay does instead.

use std::ffi::OsString;
use std::path::Path;

use clap::Command;

/// Commands of Ollama and its relatives, and what to use instead.
const COMMANDS: &[(&[&str], &str)] = &[
    (&["chat", "generate", "ask"], "`forebay run` answers a prompt; without one it opens a chat"),
    (&["show", "info"], "`forebay inspect` describes a model"),
    (&["server", "start", "up"], "`forebay serve` serves a model"),
    (&["download", "get", "install"], "`forebay pull` downloads a model"),
    (&["ls", "models"], "`forebay list` lists the downloaded models"),
    (&["remove", "delete", "uninstall"], "`forebay rm` removes a downloaded model"),
    (&["ps", "stop"], "a server has one model, from its start to its end; Ctrl-C ends it"),
    (&["create", "cp", "push"], "Forebay reads model files as they are, and uploads none"),
    (&["benchmark", "perf"], "`forebay bench` measures the speed of a model"),
    (&["config", "settings"], "`forebay run --print-config` shows the settings"),
];

/// Flags of llama.cpp and its relatives, and what to use instead.
const FLAGS: &[(&[&str], &str)] = &[
    (
        &["-ngl", "--gpu-layers", "--n-gpu-layers", "--num-gpu"],
        "It counts layers, but Forebay places single experts: the dense weights go to the GPU, and the experts that are \
         used most follow. --vram SIZE limits GPU memory, --device cpu goes without the GPU",
    ),
    (
        &["-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-ot", "--override-tensor", "--fit"],
        "Forebay decides by itself which experts are on the GPU: those that are used most. --vram SIZE limits GPU memory, \
         --memory SIZE limits the whole process",
    ),
    (
        &["-ts", "--tensor-split", "-sm", "--split-mode", "-mg", "--main-gpu"],
        "Forebay uses one GPU; --device cuda:1 chooses the second",
    ),
    (&["-dev"], "Use --device, such as --device cuda:0"),
    (
        &["--mlock", "--no-mmap", "--mmap", "-dio", "--direct-io"],
        "Forebay does not map the model file. It keeps in memory what fits into --memory, and reads the other experts when \
         they are needed. --io chooses how it reads",
    ),
    (&["-fa", "--flash-attn"], "Forebay has one implementation of attention: leave the flag out"),
    (
        &["-b", "--batch-size", "-ub", "--ubatch-size"],
        "Forebay chooses by itself how many tokens of a prompt it computes at once: leave the flag out",
    ),
    (
        &["-ctk", "--cache-type-k", "-ctv", "--cache-type-v"],
        "The KV cache is always f16, or f32 with --exact: leave the flag out",
    ),
    (
        &["-hf", "-hfr", "--hf-repo"],
        "Give the name as the model: `forebay run OWNER/NAME:QUANT` offers to download it",
    ),
    (&["-sys"], "Use --system"),
    (&["-np"], "Use --parallel"),
    (&["-cnv", "--conversation", "-i", "--interactive"], "Without a prompt, `forebay run` opens a chat"),
    (
        &["-no-cnv", "--no-conversation"],
        "With a prompt, `forebay run` gives one answer; --raw leaves out the chat template",
    ),
    (&["--jinja"], "Chat templates are always Jinja here: leave the flag out"),
    (
        &["-e", "--escape", "--no-escape"],
        "Forebay does not replace \\n in a prompt: use -f FILE for several lines",
    ),
    (&["-co", "--color", "--colors"], "On a terminal, reasoning is dim; NO_COLOR=1 turns that off"),
    (&["--keep", "--context-shift", "--no-context-shift"], "In a chat, /drop drops the oldest turns"),
    (
        &["--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx"],
        "Forebay takes these settings from the model file: leave the flag out",
    ),
    (&["-md", "--model-draft"], "Forebay has no speculative decoding"),
    (&["--mmproj"], "Forebay runs text models only"),
    (
        &["--lora", "--lora-scaled"],
        "Forebay does not apply LoRA adapters: merge the adapter into the model first",
    ),
];

/// Why a command line cannot be meant for this program: its command or the first flag that belongs to another one.
pub fn explain(program: &Command, args: &[OsString]) -> Option<String> {
    explain_command(program, args).or_else(|| explain_flag(program, args))
}

/// What is meant by a command that does not exist.
fn explain_command(program: &Command, args: &[OsString]) -> Option<String> {
    let name = args.get(1)?.to_str().filter(|name| !name.starts_with('-'))?;
    if name == "help" || program.find_subcommand(name).is_some() {
        return None;
    }
    if name.contains('/') || name.ends_with(".gguf") || Path::new(name).exists() {
        return Some(format!("{name} is not a command; `forebay run {name}` opens a chat with that model"));
    }
    let (_, instead) = COMMANDS.iter().find(|(names, _)| names.contains(&name))?;
    Some(format!("{name} is not a command of Forebay; {instead}"))
}

fn explain_flag(program: &Command, args: &[OsString]) -> Option<String> {
    let command = args.iter().find_map(|arg| program.find_subcommand(arg.to_str()?)).unwrap_or(program);
    let mut before = "";
    for arg in args.iter().skip(1).map_while(|arg| arg.to_str()) {
        if arg == "--" {
            return None;
        }
        let name = arg.split('=').next().unwrap_or(arg);
        let found = FLAGS.iter().find(|(names, _)| names.contains(&name));
        if let Some((_, instead)) = found
            && !takes_text(command, before)
            && !has(command, name)
        {
            return Some(format!("{name} is not a flag of Forebay. {instead}"));
        }
        before = arg;
    }
    None
}

/// Whether a flag takes the word after it as a text, whatever it is.
fn takes_text(command: &Command, flag: &str) -> bool {
    let mut known = command.get_arguments().filter(|arg| arg.is_allow_hyphen_values_set());
    known.any(|arg| {
        let short = arg.get_short().map(|short| format!("-{short}"));
        short.as_deref() == Some(flag) || longs(arg).any(|long| flag.strip_prefix("--") == Some(long))
    })
}

/// Whether the command has the flag after all.
fn has(command: &Command, flag: &str) -> bool {
    let Some(name) = flag.strip_prefix("--") else { return false };
    command.get_arguments().any(|arg| longs(arg).any(|long| long == name))
}

fn longs(arg: &clap::Arg) -> impl Iterator<Item = &str> {
    arg.get_long().into_iter().chain(arg.get_all_aliases().into_iter().flatten())
}
