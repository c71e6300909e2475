//! `forebay trace`: which experts a conversation chooses, for `forebay simulate`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use clap::Args;
use forebay_engine::conversation::ReplyOptions;
use forebay_engine::forecast::trace::{Phase, Trace};
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{ChatRequest, FinishReason, Prompter};

use crate::args::{LoadArgs, SamplingArgs, read_text};
use crate::output::{Output, print};
use crate::prompting::check_template;
use crate::run::generate_unseen;
use crate::{demo, errors, interrupt};

/// Record which experts a conversation chooses
///
/// Generates an answer and writes what every router chose for each token of the prompt and of the answer to a file. It
/// holds no text, only numbers of experts: 32 bytes a token for the demo model. `forebay simulate` plays it against
/// caches of any size.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay trace -p 'Tell me a story about a cat.' --out cat.trace
  forebay trace model.gguf -f question.txt -n 500 --seed 1 --out question.trace
  forebay simulate cat.trace")]
pub struct TraceArgs {
    /// A GGUF file, any part of a split one, a folder with safetensors files, or a download, as
    /// OWNER/NAME:QUANT [default: the demo model]
    model: Option<PathBuf>,
    #[command(flatten)]
    prompt: PromptArgs,
    /// The most tokens to generate [default: until the context is full]
    #[arg(short = 'n', long = "max-tokens", value_name = "N")]
    max_tokens: Option<usize>,
    /// Go on where the model would end its answer
    #[arg(long)]
    ignore_eos: bool,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long)]
    raw: bool,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct PromptArgs {
    /// The prompt
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// A file with the prompt
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &TraceArgs) -> Result<ExitCode> {
    args.sampling.check()?;
    let prompt = match (&args.prompt.prompt, &args.prompt.file) {
        (None, Some(path)) => read_text(path)?,
        (prompt, _) => prompt.clone().unwrap_or_default(),
    };
    if prompt.is_empty() {
        return Err(errors::usage("the prompt is empty: give one with -p or -f"));
    }
    // A file that cannot be written is found before the work and not after it.
    Output::check(&args.out)?;
    let engine = args.load.load(&demo::or_demo(args.model.as_deref())?)?;
    let trace = Arc::new(Mutex::new(Trace::new(engine.routed_layers().to_vec())?));
    let mut session = engine.session();
    interrupt::install(session.cancel())?;
    let recorder = Arc::clone(&trace);
    session.watch_routing(Some(Box::new(move |routed| {
        let mut trace = recorder.lock().unwrap_or_else(PoisonError::into_inner);
        trace.record(routed.phase, routed.layer, routed.routing);
    })));
    let mut options = ReplyOptions::default();
    options.max_tokens = args.max_tokens;
    options.sampling = args.sampling.resolve(&engine)?.into();
    options.ignore_end = args.ignore_eos;
    let prompter = Prompter::new(&engine);
    let question = if args.raw {
        let tokens = prompter.encode(&prompt, EncodeOptions { special: true, bos: Bos::AsFileSays });
        tokens.and_then(|tokens| prompter.text(tokens, options))
    } else {
        check_template(&prompter)?;
        let mut request = ChatRequest::user(&prompt);
        request.options = options;
        prompter.chat(request)
    };
    let question = question.map_err(|error| errors::explain(&engine, error))?;
    let reply = generate_unseen(&mut session, &question)?;
    if reply.answer.finish_reason == FinishReason::Cancelled {
        return Ok(ExitCode::from(interrupt::EXIT_CODE));
    }
    let trace = trace.lock().unwrap_or_else(PoisonError::into_inner);
    Output::create(&args.out)?.finish(&trace.encode())?;
    let (prompt, answer) = (trace.tokens(Phase::Prompt), trace.tokens(Phase::Answer));
    print(&format!("{}: routing of {prompt} tokens read and {answer} written\n", args.out.display()))?;
    Ok(ExitCode::SUCCESS)
}
