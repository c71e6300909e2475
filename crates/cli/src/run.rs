//! `forebay run`: an answer to a prompt, or a chat.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use forebay_engine::chat::{ChatTemplate, Message, RenderOptions};
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{Answer, Engine, Event, FinishReason, Request, Session, TokenId};

use crate::args::{LoadArgs, SamplingArgs, read_stdin};
use crate::output::{STDOUT_FAILED, print};
use crate::progress::Progress;
use crate::{chat, demo, errors, interrupt, stats};

/// Answer a prompt, or chat
///
/// Without a prompt, on a terminal, this is a chat: Ctrl-C stops an answer, Ctrl-C again or Ctrl-D leaves.
/// In a pipe the prompt is read from standard input, and only the answer is written to standard output.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay run                                         chat with the demo model
  forebay run -p 'Tell me a story about a cat.'       one answer
  forebay run model.gguf --temp 0 < question.txt > answer.txt
  forebay run model.gguf --raw -p 'Once upon a time' -n 100
  forebay run model.gguf -p 'Hello' --json | jq .stats")]
pub struct RunArgs {
    /// A GGUF file, any part of a split one, or a folder with safetensors files [default: the demo model]
    model: Option<PathBuf>,
    /// The prompt [default: a chat on a terminal, else standard input]
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// The most tokens to generate [default: until the context is full]
    #[arg(short = 'n', long = "max-tokens", value_name = "N")]
    max_tokens: Option<usize>,
    /// Text that ends the answer (may be given several times)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Go on where the model would end its answer
    #[arg(long)]
    ignore_eos: bool,
    /// Continue the prompt as it is, without the model's chat template
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
    args.sampling.check()?;
    let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let prompt = match &args.prompt {
        Some(prompt) => Some(prompt.clone()),
        None if args.json || args.raw || !terminal => Some(read_stdin()?),
        None => None,
    };
    // What a pipe's last line ends with is no part of the question.
    let prompt = if args.raw { prompt } else { prompt.map(|p| p.trim_end_matches(['\r', '\n']).to_owned()) };
    if prompt.as_ref().is_some_and(String::is_empty) {
        return Err(errors::usage("the prompt is empty: give one with -p, or on standard input"));
    }
    let engine = args.load.load(&demo::or_demo(args.model.as_deref())?)?;
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
    let mut stdout = std::io::stdout().lock();
    let bar = if stdout.is_terminal() { WritingBar::No } else { WritingBar::Yes };
    generate(session, request, bar, |text| stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()))
}

/// Generates an answer that nobody reads while it is written.
pub fn generate_unseen(session: &mut Session, request: &Request) -> Result<Answer> {
    generate(session, request, WritingBar::Yes, |_| Ok(()))
}

/// Whether the writing of an answer has a progress bar: where it appears on the terminal it is one itself.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WritingBar {
    Yes,
    No,
}

fn generate(
    session: &mut Session,
    request: &Request,
    bar: WritingBar,
    mut write: impl FnMut(&str) -> io::Result<()>,
) -> Result<Answer> {
    let engine = session.engine().clone();
    let cancel = session.cancel().clone();
    let mut failure = None;
    let mut reading = Some(Progress::reading(request.prompt.len()));
    let mut writing = None;
    let answer = session.generate(request, &mut |event| match event {
        Event::Prompt { done, total } => {
            if let Some(bar) = &reading {
                bar.set(done as u64, total as u64);
            }
            if done == total {
                reading = None;
                writing = (bar == WritingBar::Yes).then(Progress::writing);
            }
        }
        Event::Text(text) => {
            reading = None;
            if let Some(bar) = &writing {
                bar.add(text.len() as u64);
            }
            if let Err(error) = write(text) {
                // Nobody reads any more, so nothing more is computed.
                cancel.cancel();
                failure.get_or_insert(error);
            }
        }
    });
    match failure {
        Some(error) => Err(error).context(STDOUT_FAILED),
        None => answer.map_err(|error| errors::explain(&engine, error)),
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
        let answer = generate_unseen(session, &request)?;
        print(&format!("{}\n", serde_json::to_string_pretty(&stats::answer(session.engine(), &answer))?))?;
        answer
    } else {
        let answer = stream(session, &request)?;
        print("\n")?;
        stats::close(session.engine(), &answer);
        answer
    };
    Ok(match answer.finish_reason {
        FinishReason::Cancelled => ExitCode::from(interrupt::EXIT_CODE),
        FinishReason::Stop | FinishReason::Length => ExitCode::SUCCESS,
    })
}
