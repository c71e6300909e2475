//! `forebay trace`: records which experts a conversation uses, for `forebay simulate`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use clap::Args;
use forebay_engine::conversation::ReplyOptions;
use forebay_engine::internals::forecast::trace::{Phase, Trace};
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{ChatRequest, FinishReason, Prompter};

use crate::args::{LoadArgs, ModelArgs, SamplingArgs, read_text};
use crate::output::{Output, print};
use crate::prompting::check_template;
use crate::run::generate_unseen;
use crate::{errors, interrupt};

/// Record which experts a conversation uses
///
/// Generates an answer and writes a trace: for each token of the prompt and the answer, the experts that every router
/// chose. A trace holds expert numbers and no text, 32 bytes per token for the demo model. `forebay simulate` replays it
/// against expert caches of several sizes.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay trace -p 'Tell me a story about a cat.' --out cat.trace
  forebay trace model.gguf -f question.txt -n 500 --seed 1 --out question.trace
  forebay simulate cat.trace")]
pub struct TraceArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long, help_heading = "Prompt")]
    raw: bool,
    /// Trace file to write
    #[arg(short, long, visible_alias = "output", value_name = "FILE", help_heading = "Output")]
    out: PathBuf,
    /// Maximum number of tokens to generate [default: until the context is full]
    #[arg(short = 'n', long = "max-tokens", visible_aliases = ["n-predict", "predict"], value_name = "N",
        help_heading = "Output")]
    max_tokens: Option<usize>,
    /// Keep generating where the model would end its answer
    #[arg(long, help_heading = "Output")]
    ignore_eos: bool,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
#[command(next_help_heading = "Prompt")]
struct PromptArgs {
    /// Prompt
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// File with the prompt
    #[arg(short = 'f', long = "prompt-file", visible_alias = "file", value_name = "FILE")]
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
    // Whether the file can be written is checked before the work.
    Output::check(&args.out)?;
    let engine = args.load.load(&args.model.locate()?)?;
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
    print(&format!(
        "{}: expert use of {prompt} prompt tokens and {answer} generated tokens\n",
        args.out.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}
