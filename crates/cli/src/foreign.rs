//! Flags of other programs that mean nothing here: what Forebay does instead.

use std::ffi::OsString;

use clap::Command;

/// Flags of llama.cpp and its relatives, and what to do without them.
const FLAGS: &[(&[&str], &str)] = &[
    (
        &["-ngl", "--gpu-layers", "--n-gpu-layers", "--num-gpu"],
        "Forebay does not split a model by layers: the dense weights go to the GPU, and experts move between drive, \
         memory and GPU by use. --device cpu or cuda:0 chooses where to compute, --vram SIZE limits GPU memory",
    ),
    (
        &["-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-ot", "--override-tensor", "--fit"],
        "Forebay places experts by itself, those used most on the GPU. --vram SIZE limits GPU memory, --memory SIZE the \
         whole process",
    ),
    (
        &["-ts", "--tensor-split", "-sm", "--split-mode", "-mg", "--main-gpu"],
        "Forebay computes on one GPU; --device cuda:1 chooses another one than the first",
    ),
    (
        &["--mlock", "--no-mmap", "--mmap", "-dio", "--direct-io"],
        "Forebay does not map the model's file: it reads what fits into the budget of --memory and the other experts when \
         they are needed. --io chooses how",
    ),
    (&["-fa", "--flash-attn"], "Forebay has one implementation of attention; leave the flag out"),
    (
        &["-b", "--batch-size", "-ub", "--ubatch-size"],
        "Forebay chooses how many tokens of a prompt it computes at once",
    ),
    (
        &["-ctk", "--cache-type-k", "-ctv", "--cache-type-v"],
        "the KV cache is f16 (f32 with --exact), and there is nothing to choose",
    ),
    (&["-hf", "-hfr", "--hf-repo"], "name the model instead: `forebay pull OWNER/NAME:QUANT` downloads it"),
    (&["-sys"], "use --system"),
    (&["-np"], "use --parallel"),
    (&["-cnv", "--conversation", "-i", "--interactive"], "without a prompt, `forebay run` is a chat"),
    (
        &["-no-cnv", "--no-conversation"],
        "with a prompt, `forebay run` gives one answer; --raw leaves out the chat template",
    ),
    (&["--jinja"], "chat templates are always Jinja here; leave the flag out"),
    (&["--mmproj"], "Forebay runs text models only"),
    (
        &["--lora", "--lora-scaled"],
        "Forebay does not apply LoRA adapters; merge the adapter into the model first",
    ),
];

/// Why a command line cannot be meant for this program: the first flag in it that belongs to another one.
pub fn explain(program: &Command, args: &[OsString]) -> Option<String> {
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
            return Some(format!("{name} is not a flag of Forebay: {instead}"));
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
