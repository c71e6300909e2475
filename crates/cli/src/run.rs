//! `forebay run`: an answer to a prompt, or a chat.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use forebay_engine::chat::Message;
use forebay_engine::conversation::{Format, ReplyOptions};
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{
    ChatRequest, Engine, FinishReason, Grammar, Prompter, Question, Reply, ReplyEvent, Session,
};
use serde_json::Value;
use terminal_size::{Width, terminal_size};

use crate::args::{LoadArgs, ModelArgs, PromptArgs, SamplingArgs, read_stdin, read_text};
use crate::output::{STDOUT_FAILED, print};
use crate::progress::Progress;
use crate::prompting::{PromptingArgs, check_template};
use crate::wrap::Wrap;
use crate::{chat, errors, interrupt, stats};

/// Answer a prompt, or chat
///
/// Without a prompt, `forebay run` opens a chat on a terminal: Ctrl-C stops an answer, Ctrl-D leaves, /help lists the
/// commands. In a pipe, the prompt is read from standard input. With a prompt and a pipe, the piped text follows the prompt
/// after a blank line. Only the answer is written to standard output.
///
/// The reasoning of a model is shown dim on a terminal and left out in a pipe.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay run                                          chat with the demo model
  forebay run model.gguf --memory 8G                   chat with a model, in 8 GiB of memory
  forebay run model.gguf 'Tell me a story.'            one answer
  forebay run -p 'Tell me a story.'                    one answer of the demo model
  cat mail.txt | forebay run model.gguf -p 'Summarise this mail:'
  forebay run model.gguf --temp 0 < question.txt > answer.txt
  forebay run model.gguf --system 'You are a pirate.' --prompt-file letter.txt
  forebay run model.gguf --raw -p 'Once upon a time' -n 100
  forebay run model.gguf -p 'Hello' --json | jq .stats
  forebay run model.gguf -p 'A cat, as data.' --json-schema '{\"type\":\"object\"}'
  forebay run model.gguf -p 'Is water wet?' --grammar answer.lark")]
pub struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    prompting: PromptingArgs,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long, help_heading = "Prompt")]
    raw: bool,
    /// Maximum number of tokens to generate [default: until the context is full]
    #[arg(short = 'n', long = "max-tokens", visible_aliases = ["n-predict", "predict"], value_name = "N",
        help_heading = ANSWER)]
    max_tokens: Option<usize>,
    /// Text that ends the answer (repeatable)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = ANSWER)]
    stop: Vec<String>,
    /// Keep generating where the model would end its answer
    #[arg(long, help_heading = ANSWER)]
    ignore_eos: bool,
    /// JSON schema that the answer must match: a file or the schema itself; turns reasoning off
    #[arg(long, value_name = "FILE|JSON", help_heading = ANSWER)]
    json_schema: Option<String>,
    /// File with a Lark grammar that the answer must match; turns reasoning off
    #[arg(long, value_name = "FILE", conflicts_with = "json_schema", help_heading = ANSWER)]
    grammar: Option<PathBuf>,
    /// Print one JSON object: text, reasoning, tokens, finish_reason, seed, stats
    #[arg(long, help_heading = ANSWER)]
    json: bool,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

const ANSWER: &str = "Answer";

/// The required form of an answer.
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

/// The required form of an answer, compiled for this model.
fn format(shape: Option<&Shape>, engine: &Engine) -> Result<Format> {
    shape.map_or(Ok(Format::Text), |shape| Ok(Format::Grammar(shape.grammar(engine)?)))
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
    let prompt = match args.prompt.read()? {
        None if args.json || args.raw || !terminal => Some(read_stdin()?),
        prompt => prompt,
    };
    // The line break at the end of a pipe does not belong to the prompt.
    let prompt = if args.raw { prompt } else { prompt.map(|p| p.trim_end_matches(['\r', '\n']).to_owned()) };
    if prompt.as_ref().is_some_and(String::is_empty) {
        return Err(errors::usage(
            "the prompt is empty: give one after the model, with -p, with -f FILE, or on standard input",
        ));
    }
    let shape = args.shape()?;
    let model = args.model.locate()?;
    let engine = args.load.load(&model)?;
    let prompter = args.prompting.prompter(&engine)?;
    let session = engine.session();
    interrupt::install(session.cancel())?;
    let mut options = ReplyOptions::default();
    options.max_tokens = args.max_tokens;
    options.reasoning = args.prompting.think_budget;
    options.sampling = args.sampling.resolve(&engine)?.into();
    options.stop = args.stop.clone();
    options.ignore_end = args.ignore_eos;
    options.format = format(shape.as_ref(), &engine)?;
    // Now only the session and the prompter hold the engine, and the chat can release it.
    drop(engine);
    let Some(prompt) = prompt else {
        let mut request = ChatRequest::default();
        request.think = args.prompting.think;
        request.options = options;
        return chat::run(session, prompter, request, args.prompting.system.clone(), &|lost| {
            let engine = args.load.load_after(lost, &model)?;
            Ok((args.prompting.prompter(&engine)?, format(shape.as_ref(), &engine)?))
        });
    };
    answer(args, session, &prompter, &prompt, options)
}

/// The kind of a piece of text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TextKind {
    Reasoning,
    Answer,
}

/// Answers a question and writes the text to standard output as it comes. Reasoning is written dim on a terminal, and not at
/// all elsewhere. On a terminal lines are wrapped between words.
pub fn stream(session: &mut Session, question: &Question) -> Result<Reply> {
    let mut stdout = io::stdout().lock();
    let terminal = stdout.is_terminal();
    let bar = if terminal { WritingBar::No } else { WritingBar::Yes };
    let mut wrap = Wrap::default();
    let dim = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut before = None;
    generate(session, question, bar, |kind, text| {
        let before = before.replace(kind);
        if kind == TextKind::Reasoning && !terminal {
            return Ok(());
        }
        let mut shown = |text: &str| match terminal_size() {
            Some((Width(columns), _)) if terminal => wrap.push(text, columns.into()),
            _ => text.to_owned(),
        };
        if kind == TextKind::Answer && before == Some(TextKind::Reasoning) && terminal {
            stdout.write_all(shown("\n\n").as_bytes())?;
        }
        let text = shown(text);
        if kind == TextKind::Reasoning && dim {
            write!(stdout, "\x1b[2m{text}\x1b[0m")?;
        } else {
            stdout.write_all(text.as_bytes())?;
        }
        stdout.flush()
    })
}

/// Generates an answer without writing it.
pub fn generate_unseen(session: &mut Session, question: &Question) -> Result<Reply> {
    generate(session, question, WritingBar::Yes, |_, _| Ok(()))
}

/// Whether generation has a progress bar. An answer on the terminal shows its own progress.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WritingBar {
    Yes,
    No,
}

/// Answers a question and passes each piece of text to `write`.
fn generate(
    session: &mut Session,
    question: &Question,
    bar: WritingBar,
    mut write: impl FnMut(TextKind, &str) -> io::Result<()>,
) -> Result<Reply> {
    let engine = session.engine().clone();
    let cancel = session.cancel().clone();
    let mut failure = None;
    let mut reading = None;
    let mut writing = None;
    let reply = session.reply(question, &mut |event| {
        let (kind, text) = match event {
            ReplyEvent::Start(meter) => {
                reading = Some(Progress::prompt(meter));
                return;
            }
            ReplyEvent::Progress { done, total } => {
                if done == total {
                    reading = None;
                    writing = (bar == WritingBar::Yes).then(Progress::writing);
                }
                return;
            }
            ReplyEvent::Reasoning(text) => (TextKind::Reasoning, text),
            ReplyEvent::Content { text, .. } => (TextKind::Answer, text),
            // Without tools there are no calls.
            ReplyEvent::Call { .. } | ReplyEvent::Arguments(_) | ReplyEvent::End(_) => return,
        };
        reading = None;
        if let Some(bar) = &writing {
            bar.add(text.len() as u64);
        }
        if failure.is_none()
            && let Err(error) = write(kind, &text)
        {
            // The output cannot be written, so the computation stops.
            cancel.cancel();
            failure = Some(error);
        }
    });
    match failure {
        Some(error) => Err(error).context(STDOUT_FAILED),
        None => reply.map_err(|error| errors::explain(&engine, error)),
    }
}

fn answer(
    args: &RunArgs,
    mut session: Session,
    prompter: &Prompter,
    prompt: &str,
    options: ReplyOptions,
) -> Result<ExitCode> {
    let engine = session.engine().clone();
    let question = if args.raw {
        let tokens = prompter.encode(prompt, EncodeOptions { special: true, bos: Bos::AsFileSays });
        tokens.and_then(|tokens| prompter.text(tokens, options))
    } else {
        check_template(prompter)?;
        let system = args.prompting.system.iter().map(|text| Message::new("system", text));
        let mut request = ChatRequest::new(system.chain([Message::new("user", prompt)]).collect());
        request.think = args.prompting.think;
        request.options = options;
        prompter.chat(request)
    };
    let question = question.map_err(|error| errors::explain(&engine, error))?;
    let reply = if args.json {
        let reply = generate_unseen(&mut session, &question)?;
        print(&format!("{}\n", serde_json::to_string_pretty(&stats::answer(&engine, &reply))?))?;
        reply
    } else {
        let reply = stream(&mut session, &question)?;
        print("\n")?;
        stats::close(&engine, &reply.answer);
        reply
    };
    Ok(match reply.answer.finish_reason {
        FinishReason::Cancelled => ExitCode::from(interrupt::EXIT_CODE),
        FinishReason::Stop | FinishReason::Length | FinishReason::Calls => ExitCode::SUCCESS,
    })
}
