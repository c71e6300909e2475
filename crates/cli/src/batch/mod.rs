//! `forebay batch`: answers a file of requests.

mod files;

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use clap::Args;
use forebay_engine::conversation::{Draft, ReplyOptions};
use forebay_engine::driver::{Ending, Observer, Ticket};
use forebay_engine::internals::hash::Fnv;
use forebay_engine::{Cancel, Driver, DriverOptions, Error, Prompter, Question, Reply, ReplyEvent};
use forebay_server::openai::{Body, Endpoint, Envelope, Form};
use forebay_server::{ApiError, model_name};
use serde_json::Value;

use self::files::{Answers, Earlier, Line, Requests};
use crate::args::{LoadArgs, ModelArgs};
use crate::errors::in_flags;
use crate::interrupt;
use crate::output::print;
use crate::progress::Progress;
use crate::prompting::read_template;
use crate::values::{at_least_one, on_off};

/// The default number of conversations that are computed together.
const DEFAULT_PARALLEL: usize = 128;

/// Answer a file of requests
///
/// IN has one request per line, in the JSON format of OpenAI's batch API: a custom_id and a body. The body has messages, or,
/// with the url /v1/completions, a prompt to continue. It may use every field that `forebay serve` supports (docs/server.md)
/// except stream. The answers go to the file after --out, one per line, as they finish. Many requests go through the model
/// together, and each expert is read once per step for all of them, which is much faster than one request at a time.
///
/// If a run is interrupted, run the same command again: it skips the requests that are already answered. IN is read line by
/// line, so it may have millions of lines. The exit code is 1 if any request was refused, in this run or in an earlier one.
///
/// An answer does not depend on the other requests. A request without a seed gets one that is derived from its custom_id.
#[derive(Args)]
#[command(
    allow_missing_positional = true,
    after_help = "\
Examples:
  forebay batch model.gguf questions.jsonl --out answers.jsonl --memory 8G
  forebay batch model.gguf questions.jsonl --out answers.jsonl -n 200 --parallel 32

A line of questions.jsonl:
  {\"custom_id\": \"1\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\",
   \"body\": {\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"max_tokens\": 50}}
(on one line)"
)]
pub struct BatchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// File of requests
    #[arg(index = 2, value_name = "IN")]
    input: PathBuf,
    /// File for the answers; answers that it already holds are kept
    #[arg(short, long, visible_alias = "output", value_name = "FILE", help_heading = "Output")]
    out: PathBuf,
    /// Maximum number of answers at a time, if memory allows
    #[arg(long, value_name = "N", default_value_t = DEFAULT_PARALLEL, value_parser = at_least_one, help_heading = ANSWERS)]
    parallel: usize,
    /// Maximum number of tokens per answer, for requests that do not say [default: until the context is full]
    #[arg(short = 'n', long = "max-tokens", visible_aliases = ["n-predict", "predict"], value_name = "N",
        value_parser = at_least_one, help_heading = ANSWERS)]
    max_tokens: Option<usize>,
    /// Turn the model's reasoning on or off for requests that do not say, if its chat template supports that [default: the
    /// template's choice]
    #[arg(long, value_name = "on|off", value_parser = on_off(), hide_possible_values = true, help_heading = ANSWERS)]
    think: Option<bool>,
    /// Jinja chat template that replaces the model's
    #[arg(long, value_name = "FILE", help_heading = ANSWERS)]
    chat_template_file: Option<PathBuf>,
    #[command(flatten)]
    load: LoadArgs,
}

const ANSWERS: &str = "Answers";

/// Runs the command.
pub fn run(args: &BatchArgs) -> Result<ExitCode> {
    let requests = Requests::open(&args.input)?;
    let names = requests.check()?;
    let (mut out, earlier) = Answers::open(&args.out)?;
    let before = Count::of(&names, &earlier);
    let left = names.len() - before.answered - before.refused;
    if left == 0 {
        let refused = match before.refused {
            0 => String::new(),
            refused => format!(", {refused} of them refused (their lines in the file say why)"),
        };
        print(&format!("{}: all {} requests are answered{refused}\n", args.out.display(), names.len()))?;
        return Ok(before.exit_code());
    }
    drop(names);
    let model = args.model.locate()?;
    let engine = args.load.load(&model)?;
    let cancel = Cancel::default();
    interrupt::install(&cancel)?;
    let start = Instant::now();
    let (tell, told) = channel();
    let mut options = DriverOptions::new(args.parallel);
    options.leave = cancel.clone();
    let template = args.chat_template_file.as_ref().map(|path| read_template(path, &engine)).transpose()?;
    let prompter = Prompter::new(&engine).with_template(template.map(Arc::new)).with_think(args.think);
    options.prompter = Some(prompter);
    options.observer = Some(Arc::new(Counter(tell.clone())));
    let driver = Driver::start(&engine, options)?;
    // Now only the driver holds the engine.
    drop(engine);
    let name = model_name(args.model.get()?, &model);
    let (open, count) = (HashMap::new(), Count::default());
    let mut batch = Batch { driver, args, name, left, out: &mut out, told, tell, open, count };
    let answered = batch.answer(&requests, &earlier, &cancel);
    let count = batch.end();
    match answered {
        Err(error) if matches!(error.downcast_ref(), Some(forebay_engine::Error::Cancelled)) => {
            eprintln!("stopped; run the same command again to continue");
            return Ok(ExitCode::from(interrupt::EXIT_CODE));
        }
        other => other?,
    }
    let seconds = start.elapsed().as_secs_f64();
    let all = Count { refused: before.refused + count.refused, ..count };
    let mut text = format!("{} requests answered", count.answered);
    if before.answered > 0 {
        text.push_str(&format!(", {} by earlier runs", before.answered));
    }
    if all.refused > 0 {
        text.push_str(&format!(", {} refused (their lines in the file say why)", all.refused));
    }
    let (tokens, rate) = (count.tokens, count.tokens as f64 / seconds);
    print(&format!("{text} · {tokens} tokens generated in {seconds:.1} s, {rate:.1} tok/s\n"))?;
    Ok(all.exit_code())
}

/// The counts of a run.
#[derive(Clone, Copy, Default)]
struct Count {
    answered: usize,
    refused: usize,
    tokens: usize,
}

impl Count {
    /// The counts of earlier runs for these requests.
    fn of(names: &[u128], earlier: &Earlier) -> Count {
        let mut count = Count::default();
        for refused in names.iter().filter_map(|&name| earlier.was_refused(name)) {
            if refused {
                count.refused += 1;
            } else {
                count.answered += 1;
            }
        }
        count
    }

    /// A failure if requests were refused, in this run or an earlier one.
    fn exit_code(self) -> ExitCode {
        if self.refused == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// News from the driver's thread.
enum Told {
    /// One of the answers to a request has ended.
    Ended { number: usize, index: usize, result: forebay_engine::Result<Box<Reply>> },
    /// This many tokens were generated.
    Written(usize),
    /// The computation has ended.
    Gone,
}

/// Reports generated tokens and the end of the computation.
struct Counter(Sender<Told>);

impl Observer for Counter {
    fn ends_step(&self, _took: Duration, tokens: usize) {
        // At the end of the run, nobody receives this.
        let _ = self.0.send(Told::Written(tokens));
    }

    fn ends(&self, _: Ending) {
        let _ = self.0.send(Told::Gone);
    }
}

/// A request that is being answered.
struct Open {
    custom_id: String,
    form: Form,
    /// The parts of the answers so far.
    replies: Vec<Option<Reply>>,
    /// Dropping these cancels the remaining answers.
    _tickets: Vec<Ticket>,
}

/// The running requests.
struct Batch<'a> {
    driver: Driver,
    args: &'a BatchArgs,
    /// The name of the model.
    name: String,
    /// Requests without an answer from an earlier run.
    left: usize,
    out: &'a mut Answers,
    told: Receiver<Told>,
    tell: Sender<Told>,
    /// By the number of the request.
    open: HashMap<usize, Open>,
    count: Count,
}

/// Whether the request caused an error. Other errors concern the machine or the model.
fn is_its_own(error: &Error) -> bool {
    match error {
        Error::Field { error, .. } => is_its_own(error),
        Error::Context { .. } | Error::Invalid(_) | Error::Unsupported(_) => true,
        _ => false,
    }
}

/// How often to check whether the run should end.
const LOOK: Duration = Duration::from_millis(100);

impl Batch<'_> {
    fn answer(&mut self, requests: &Requests, earlier: &Earlier, cancel: &Cancel) -> Result<()> {
        let mut lines = requests.lines()?.enumerate();
        // The next request, if memory does not suffice for it before others have ended.
        let mut postponed = None;
        let bar = Progress::answering(self.left);
        let start = Instant::now();
        loop {
            // As many requests wait as run: no place stays free, and the file is not read into memory.
            while self.open.len() < self.args.parallel.saturating_mul(2) {
                cancel.check()?;
                let (number, line) = match postponed.take() {
                    Some(next) => next,
                    None => match lines.next() {
                        Some((number, line)) => (number, line?),
                        None => break,
                    },
                };
                if earlier.was_refused(files::name(&line.custom_id)).is_none() && !self.add(number, &line)? {
                    postponed = Some((number, line));
                    break;
                }
            }
            if self.open.is_empty() {
                return Ok(());
            }
            match self.told.recv_timeout(LOOK) {
                Ok(told) => self.hear(told)?,
                Err(RecvTimeoutError::Timeout) => cancel.check()?,
                Err(RecvTimeoutError::Disconnected) => unreachable!("a sender is kept here"),
            }
            while let Ok(told) = self.told.try_recv() {
                self.hear(told)?;
            }
            bar.set((self.count.answered + self.count.refused) as u64, self.left as u64);
            bar.say(format!("{:.1} tok/s", self.count.tokens as f64 / start.elapsed().as_secs_f64()));
        }
    }

    /// Waits until the computation has ended. Returns the counts.
    fn end(self) -> Count {
        self.driver.leave();
        self.driver.join();
        let written =
            self.told.try_iter().map(|told| if let Told::Written(tokens) = told { tokens } else { 0 });
        let tokens = self.count.tokens + written.sum::<usize>();
        Count { tokens, ..self.count }
    }

    /// Returns false if memory does not suffice for the request before others have ended.
    fn add(&mut self, number: usize, line: &Line) -> Result<bool> {
        match self.questions(line) {
            Ok((questions, form)) => self.ask(number, line, &questions, form)?,
            Err(error) if is_its_own(&error) => self.refuse(&line.custom_id, error)?,
            Err(error) => match error.reason() {
                Error::Budget { .. } if !self.open.is_empty() => return Ok(false),
                error => return Err(error.into()),
            },
        }
        Ok(true)
    }

    fn questions(&self, line: &Line) -> forebay_engine::Result<(Vec<Question>, Form)> {
        let Line { custom_id, url, body } = line;
        let endpoint = Endpoint::of(url.as_deref())?;
        let body = Body::read(body.clone())?;
        if body.stream == Some(true) {
            return Err(Error::field("stream", "answers to a file are not streamed"));
        }
        let adjust = |options: &mut ReplyOptions| {
            options.max_tokens = options.max_tokens.or(self.args.max_tokens);
            options.sampling.seed = options.sampling.seed.or(Some(hash(custom_id)));
            // The same request gets the same answer in every run.
            options.call_ids = Some(format!("call_{:016x}_", hash(custom_id)));
        };
        body.questions(endpoint, self.driver.prompter(), adjust)
    }

    fn ask(&mut self, number: usize, line: &Line, questions: &[Question], form: Form) -> Result<()> {
        let each = form.each;
        let all = questions.iter().flat_map(|question| (0..each).map(move |i| question.nth(i)));
        let mut tickets = Vec::with_capacity(questions.len() * each);
        for (index, question) in all.enumerate() {
            let (tell, mut draft) = (self.tell.clone(), Draft::default());
            let tell = move |event: forebay_engine::Result<ReplyEvent>| {
                let result = match event {
                    Ok(event) => draft.take(event).map(|reply| Ok(Box::new(reply))),
                    Err(error) => Some(Err(error)),
                };
                if let Some(result) = result {
                    // At the end of the run, nobody receives this.
                    let _ = tell.send(Told::Ended { number, index, result });
                }
            };
            tickets.push(self.driver.ask_telling(question, tell)?);
        }
        let replies = tickets.iter().map(|_| None).collect();
        let custom_id = line.custom_id.clone();
        self.open.insert(number, Open { custom_id, form, replies, _tickets: tickets });
        Ok(())
    }

    fn hear(&mut self, told: Told) -> Result<()> {
        let (number, index, result) = match told {
            Told::Written(tokens) => {
                self.count.tokens += tokens;
                return Ok(());
            }
            Told::Gone => bail!(
                "the compute thread stopped because of a bug (see above); run the same command again to continue"
            ),
            Told::Ended { number, index, result } => (number, index, result),
        };
        // A refused request may have had other answers.
        let Some(open) = self.open.get_mut(&number) else { return Ok(()) };
        match result {
            Ok(reply) => open.replies[index] = Some(*reply),
            // An error of the request goes into its line. An error of the machine ends the run, and a later
            // run continues.
            Err(error) if is_its_own(&error) => {
                let open = self.open.remove(&number).expect("it is there");
                return self.refuse(&open.custom_id, error);
            }
            Err(error) => return Err(error.into()),
        }
        if open.replies.iter().all(Option::is_some) {
            let open = self.open.remove(&number).expect("it is there");
            self.count.answered += 1;
            let body = self.body(&open.custom_id, open.form, open.replies.into_iter().flatten().collect());
            self.out.write(&open.custom_id, 200, &body)?;
        }
        Ok(())
    }

    /// The answer of `serve` without measured fields, so that the file depends only on the requests.
    fn body(&self, custom_id: &str, form: Form, replies: Vec<Reply>) -> Value {
        let id = format!("{}{:016x}", form.endpoint.prefix(), hash(custom_id));
        let envelope = Envelope { id, created: now(), model: self.name.clone(), form, is_stream: false };
        let mut body = envelope.whole(&replies, self.driver.engine().tokenizer());
        if let Some(usage) = body["usage"].as_object_mut() {
            usage.shift_remove("prompt_tokens_details");
        }
        body
    }

    fn refuse(&mut self, custom_id: &str, error: Error) -> Result<()> {
        self.count.refused += 1;
        let error = ApiError::from(error).in_words(in_flags);
        self.out.write(custom_id, error.status.as_u16(), &error.openai())
    }
}

/// A number that is derived from a name, the same in every run.
fn hash(name: &str) -> u64 {
    Fnv::of(name.as_bytes())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
