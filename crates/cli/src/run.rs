//! `forebay run`: an answer to a prompt, or a chat.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use forebay_engine::chat::Message;
use forebay_engine::chat::dialect::{Parser, Piece};
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{Answer, Engine, Event, FinishReason, Grammar, Request, Session};
use serde_json::Value;

use crate::args::{LoadArgs, SamplingArgs, read_stdin, read_text};
use crate::output::{STDOUT_FAILED, print};
use crate::progress::Progress;
use crate::prompting::{Prompting, PromptingArgs};
use crate::{chat, demo, errors, interrupt, stats};

/// Answer a prompt, or chat
///
/// Without a prompt, on a terminal, this is a chat: Ctrl-C stops an answer, Ctrl-C again or Ctrl-D leaves.
/// In a pipe the prompt is read from standard input, and only the answer is written to standard output. A model's
/// reasoning is shown dim on a terminal, and left out in a pipe.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay run                                         chat with the demo model
  forebay run -p 'Tell me a story about a cat.'       one answer
  forebay run model.gguf --temp 0 < question.txt > answer.txt
  forebay run model.gguf --system 'You are a pirate.' --prompt-file letter.txt
  forebay run model.gguf --raw -p 'Once upon a time' -n 100
  forebay run model.gguf -p 'Hello' --json | jq .stats
  forebay run model.gguf -p 'A cat, as data.' --json-schema '{\"type\":\"object\"}'
  forebay run model.gguf -p 'Is water wet?' --grammar answer.lark")]
pub struct RunArgs {
    /// A GGUF file, any part of a split one, a folder with safetensors files, or a download, as
    /// OWNER/NAME:QUANT [default: the demo model]
    model: Option<PathBuf>,
    /// The prompt [default: a chat on a terminal, else standard input]
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// A file with the prompt
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
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
    /// Have the answer be JSON of this schema: a file, or the schema itself. There is no reasoning before it
    #[arg(long, value_name = "FILE|JSON")]
    json_schema: Option<String>,
    /// Have the answer be what the Lark grammar in this file describes. There is no reasoning before it
    #[arg(long, value_name = "FILE", conflicts_with = "json_schema")]
    grammar: Option<PathBuf>,
    /// Print one JSON object: text, reasoning, tokens, finish_reason, stats
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    prompting: PromptingArgs,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// What the answer must be.
enum Shape {
    Schema(Value),
    Lark(String),
}

impl Shape {
    fn grammar(&self, engine: &Engine) -> Result<Grammar> {
        Ok(match self {
            Shape::Schema(schema) => Grammar::json_schema(engine, schema)?,
            Shape::Lark(source) => Grammar::lark(engine, source)?,
        })
    }
}

impl RunArgs {
    fn shape(&self) -> Result<Option<Shape>> {
        if let Some(schema) = &self.json_schema {
            let inline = schema.trim_start().starts_with(['{', '[']);
            let text = if inline { schema.clone() } else { read_text(Path::new(schema))? };
            let schema = serde_json::from_str(&text)
                .map_err(|error| errors::usage(format!("--json-schema is not JSON: {error}")))?;
            return Ok(Some(Shape::Schema(schema)));
        }
        self.grammar.as_ref().map(|path| Ok(Shape::Lark(read_text(path)?))).transpose()
    }
}

/// Runs the command.
pub fn run(args: &RunArgs) -> Result<ExitCode> {
    args.sampling.check()?;
    let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let prompt = match (&args.prompt, &args.prompt_file) {
        (Some(prompt), _) => Some(prompt.clone()),
        (None, Some(path)) => Some(read_text(path)?),
        (None, None) if args.json || args.raw || !terminal => Some(read_stdin()?),
        (None, None) => None,
    };
    // What a pipe's last line ends with is no part of the question.
    let prompt = if args.raw { prompt } else { prompt.map(|p| p.trim_end_matches(['\r', '\n']).to_owned()) };
    if prompt.as_ref().is_some_and(String::is_empty) {
        return Err(errors::usage("the prompt is empty: give one with -p, in a file, or on standard input"));
    }
    let shape = args.shape()?;
    let model = demo::or_demo(args.model.as_deref())?;
    let engine = args.load.load(&model)?;
    let prompting = args.prompting.prompting(&engine)?;
    let session = engine.session();
    interrupt::install(session.cancel())?;
    let request = Request {
        max_tokens: args.max_tokens,
        sampling: args.sampling.resolve(&engine)?,
        stop: args.stop.clone(),
        ignore_end: args.ignore_eos,
        grammar: shape.as_ref().map(|shape| shape.grammar(&engine)).transpose()?,
        ..Request::default()
    };
    // Only the session has it now, and can let go of it.
    drop(engine);
    match prompt {
        Some(prompt) => answer(args, session, &prompt, request, &prompting),
        None => chat::run(session, request, prompting, &|lost| {
            let engine = args.load.load_after(lost, &model)?;
            let grammar = shape.as_ref().map(|shape| shape.grammar(&engine)).transpose()?;
            Ok((engine, grammar))
        }),
    }
}

/// An answer, and what of its text is what.
pub struct Said {
    pub answer: Answer,
    /// What the model said.
    pub text: String,
    /// What it said to itself before.
    pub reasoning: String,
}

/// What a piece of text is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Answer,
}

/// Generates an answer and writes its text to standard output as it comes. The parser tells reasoning from what is said:
/// it is written dim on a terminal, and not at all elsewhere.
pub fn stream(session: &mut Session, request: &Request, parser: Option<Parser>) -> Result<Said> {
    let mut stdout = io::stdout().lock();
    let terminal = stdout.is_terminal();
    let bar = if terminal { WritingBar::No } else { WritingBar::Yes };
    let dim = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    said(session, request, bar, parser, |kind, text, before| {
        if kind == Kind::Reasoning && !terminal {
            return Ok(());
        }
        if kind == Kind::Answer && before == Some(Kind::Reasoning) && terminal {
            stdout.write_all(b"\n\n")?;
        }
        if kind == Kind::Reasoning && dim {
            write!(stdout, "\x1b[2m{text}\x1b[0m")?;
        } else {
            stdout.write_all(text.as_bytes())?;
        }
        stdout.flush()
    })
}

/// Generates an answer and tells `write` what comes, and what came before it.
fn said(
    session: &mut Session,
    request: &Request,
    bar: WritingBar,
    mut parser: Option<Parser>,
    write: impl FnMut(Kind, &str, Option<Kind>) -> io::Result<()>,
) -> Result<Said> {
    let mut hearer = Hearer { parts: Default::default(), last: None, result: Ok(()), write };
    let answer = generate(session, request, bar, |text| {
        match &mut parser {
            Some(parser) => parser.push(text, &mut |piece| hearer.hear(piece)),
            None => hearer.take(Kind::Answer, text),
        }
        std::mem::replace(&mut hearer.result, Ok(()))
    })?;
    if let Some(parser) = parser {
        parser.finish(&mut |piece| hearer.hear(piece));
    }
    hearer.result.context(STDOUT_FAILED)?;
    let [reasoning, text] = hearer.parts;
    Ok(Said { answer, text, reasoning })
}

/// Collects what is said and passes it on.
struct Hearer<W> {
    /// Reasoning and answer.
    parts: [String; 2],
    last: Option<Kind>,
    /// Of passing on.
    result: io::Result<()>,
    write: W,
}

impl<W: FnMut(Kind, &str, Option<Kind>) -> io::Result<()>> Hearer<W> {
    fn hear(&mut self, piece: Piece<'_>) {
        match piece {
            Piece::Reasoning(text) => self.take(Kind::Reasoning, text),
            Piece::Content(text) => self.take(Kind::Answer, text),
            // There are no tools here, and so no calls.
            Piece::Call { .. } | Piece::Arguments(_) => {}
        }
    }

    fn take(&mut self, kind: Kind, text: &str) {
        self.parts[kind as usize].push_str(text);
        let before = self.last.replace(kind);
        if self.result.is_ok() {
            self.result = (self.write)(kind, text, before);
        }
    }
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
        Event::Token(_) => {}
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

fn answer(
    args: &RunArgs,
    mut session: Session,
    prompt: &str,
    mut request: Request,
    prompting: &Prompting,
) -> Result<ExitCode> {
    let engine = session.engine().clone();
    let parser = if args.raw {
        let options = EncodeOptions { special: true, bos: Bos::AsFileSays };
        request.prompt = engine.tokenizer().encode(prompt, options)?;
        None
    } else {
        prompting.ask(&engine, &[Message::new("user", prompt)], &mut request)?
    };
    let said = if args.json {
        let said = said(&mut session, &request, WritingBar::Yes, parser, |_, _, _| Ok(()))?;
        print(&format!("{}\n", serde_json::to_string_pretty(&stats::answer(&engine, &said))?))?;
        said
    } else {
        let said = stream(&mut session, &request, parser)?;
        print("\n")?;
        stats::close(&engine, &said.answer);
        said
    };
    Ok(match said.answer.finish_reason {
        FinishReason::Cancelled => ExitCode::from(interrupt::EXIT_CODE),
        FinishReason::Stop | FinishReason::Length => ExitCode::SUCCESS,
    })
}
