//! `forebay run`: an answer to a prompt, or a chat.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use forebay_engine::chat::{ChatTemplate, Message, RenderOptions};
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{Answer, Engine, Event, FinishReason, Request, Session, TokenId};

use crate::args::{LoadArgs, SamplingArgs, read_stdin};
use crate::{chat, demo, interrupt, progress, stats};

/// Answer a prompt, or chat
///
/// Without a prompt, on a terminal, this is a chat: Ctrl-C stops an answer, Ctrl-C again or Ctrl-D leaves.
/// In a pipe the prompt is read from standard input, and only the answer is written to standard output.
#[derive(Args)]
pub struct RunArgs {
    /// A GGUF file, or any part of a split one [default: the demo model]
    model: Option<PathBuf>,
    /// The prompt
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// The most tokens to generate [default: until the context is full]
    #[arg(short = 'n', long = "max-tokens", value_name = "N")]
    max_tokens: Option<usize>,
    /// Text that ends the answer (may be given several times)
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Go on where the model would end its answer
    #[arg(long)]
    ignore_eos: bool,
    /// Take the prompt as it is, without the model's chat template
    #[arg(long)]
    raw: bool,
    /// Print one JSON object: text, tokens, finish_reason, stats
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Runs the command.
pub fn run(args: &RunArgs) -> Result<ExitCode> {
    let interactive = args.prompt.is_none() && std::io::stdin().is_terminal();
    if interactive && args.json {
        bail!("--json prints one answer: give a prompt with -p, or on standard input");
    }
    if interactive && args.raw {
        bail!("--raw continues one text: give it with -p, or on standard input");
    }
    let prompt = match &args.prompt {
        Some(prompt) => Some(prompt.clone()),
        None if interactive => None,
        None => Some(read_stdin()?),
    };
    let path = match &args.model {
        Some(path) => path.clone(),
        None => demo::path()?,
    };
    let engine = args.load.load(&path)?;
    let mut session = engine.session();
    interrupt::install(session.cancel())?;
    let template = Request {
        prompt: Vec::new(),
        max_tokens: args.max_tokens,
        sampling: args.sampling.resolve(&engine)?,
        stop: args.stop.clone(),
        ignore_end: args.ignore_eos,
    };
    match prompt {
        Some(prompt) => answer(args, &mut session, &prompt, template),
        None => chat::run(&mut session, &template),
    }
}

/// The tokens of a conversation, ready for the model's answer.
pub fn conversation_tokens(engine: &Engine, messages: &[Message]) -> Result<Vec<TokenId>> {
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let text = chat_template(engine)?.render(messages, &options)?;
    // A template writes the BOS token itself where the model wants one.
    let options = EncodeOptions { special: true, bos: Bos::Never };
    Ok(engine.tokenizer().encode(&text, options)?)
}

/// The model's chat template.
pub fn chat_template(engine: &Engine) -> Result<&ChatTemplate> {
    engine.template()?.with_context(|| {
        let path = engine.file().path().display();
        format!("{path} has no chat template; use --raw -p TEXT to continue a text as it is")
    })
}

/// Generates an answer and writes its text to standard output as it comes.
pub fn stream(session: &mut Session, request: &Request) -> Result<Answer> {
    let bar = progress::Reading::new();
    let cancel = session.cancel().clone();
    let mut stdout = std::io::stdout().lock();
    let mut failure = None;
    let answer = session.generate(request, &mut |event| match event {
        Event::Prompt { done, total } => bar.set(done, total),
        Event::Text(text) => {
            let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
            if let Err(error) = written {
                // Nobody reads any more, so nothing more is computed.
                cancel.cancel();
                failure.get_or_insert(error);
            }
        }
    });
    bar.finish();
    match failure {
        Some(error) => Err(error.into()),
        None => Ok(answer?),
    }
}

fn answer(args: &RunArgs, session: &mut Session, prompt: &str, mut request: Request) -> Result<ExitCode> {
    let engine = session.engine();
    request.prompt = if args.raw {
        engine.tokenizer().encode(prompt, EncodeOptions { special: true, bos: Bos::AsFileSays })?
    } else {
        conversation_tokens(engine, &[Message::new("user", prompt)])?
    };
    let answer = if args.json {
        let answer = session.generate(&request, &mut |_| {})?;
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{}", serde_json::to_string_pretty(&stats::answer(&answer))?)?;
        answer
    } else {
        let answer = stream(session, &request)?;
        writeln!(std::io::stdout())?;
        if std::io::stderr().is_terminal() {
            eprintln!("\n{}", stats::line(&answer.stats));
        }
        answer
    };
    Ok(match answer.finish_reason {
        FinishReason::Cancelled => ExitCode::from(interrupt::EXIT_CODE),
        FinishReason::Stop | FinishReason::Length => ExitCode::SUCCESS,
    })
}
