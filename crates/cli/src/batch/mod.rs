//! `forebay batch`: many answers from one file to another.

mod files;

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use clap::Args;
use forebay_engine::chat::dialect::Parser;
use forebay_engine::{Answer, Cancel, Crowd, CrowdOptions, Engine, Error, Event, Fnv, Listener};

use self::files::{Answers, Earlier, Line, Requests};
use crate::args::{LoadArgs, at_least_one};
use crate::openai::{Body, Endpoint, Refusal, completion};
use crate::output::print;
use crate::progress::Progress;
use crate::{demo, interrupt};

/// Conversations that take steps together when nobody says.
const DEFAULT_PARALLEL: usize = 128;

/// Answer a file of requests, overnight
///
/// IN has a line of JSON for each request, in the shape of OpenAI's batches: custom_id, and a body with messages; or,
/// where the url is /v1/completions, with a prompt that is continued as it is. OUT gets a line for each answer when it is ready. Many requests go through the model together, so that each expert is
/// read once per step for all of them: that is much faster than one after another.
///
/// If a run is interrupted, run the same command again: it continues, and answers that OUT already holds are not computed
/// again. IN is read line by line, so it may have millions of lines. The exit code is 1 if any request of IN was refused, in this run
/// or in an earlier one.
/// An answer does not depend on what else is answered: without a seed of its own, a request has one that follows from its
/// custom_id.
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
    /// A GGUF file, any part of a split one, a folder with safetensors files, or a name such as REPO:QUANT. Without one,
    /// the demo model answers
    // The places are said because a default from a file of settings would change their order.
    #[arg(index = 1)]
    model: Option<PathBuf>,
    /// The file of requests
    #[arg(index = 2, value_name = "IN")]
    input: PathBuf,
    /// Where answers go
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// The most tokens of an answer whose request does not say
    #[arg(short = 'n', long = "max-tokens", value_name = "N", value_parser = at_least_one)]
    max_tokens: Option<usize>,
    /// Conversations that take steps together, if memory has room for them
    #[arg(long, value_name = "N", default_value_t = DEFAULT_PARALLEL, value_parser = at_least_one)]
    parallel: usize,
    #[command(flatten)]
    load: LoadArgs,
}

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
            refused => format!(", {refused} of them with a refusal (see their lines)"),
        };
        print(&format!(
            "{}: all {} requests have been answered{refused}\n",
            args.out.display(),
            names.len()
        ))?;
        return Ok(before.exit_code());
    }
    drop(names);
    let engine = args.load.load(&demo::or_demo(args.model.as_deref())?)?;
    let cancel = Cancel::default();
    interrupt::install(&cancel)?;
    let start = Instant::now();
    let mut batch = Batch::new(&engine, args, left, &mut out);
    let count = match batch.answer(&requests, &earlier, &cancel) {
        Err(error) if matches!(error.downcast_ref(), Some(forebay_engine::Error::Cancelled)) => {
            eprintln!("stopped: the same call goes on where it was");
            return Ok(ExitCode::from(interrupt::EXIT_CODE));
        }
        other => other?,
    };
    let seconds = start.elapsed().as_secs_f64();
    let all = Count { refused: before.refused + count.refused, ..count };
    let mut text = format!("{} requests answered", count.answered);
    if before.answered > 0 {
        text.push_str(&format!(", {} had been before", before.answered));
    }
    if all.refused > 0 {
        text.push_str(&format!(", {} refused (see their lines)", all.refused));
    }
    let (tokens, rate) = (count.tokens, count.tokens as f64 / seconds);
    print(&format!("{text} · {tokens} tokens written in {seconds:.1} s, {rate:.1} tok/s\n"))?;
    Ok(all.exit_code())
}

/// What was done.
#[derive(Clone, Copy, Default)]
struct Count {
    answered: usize,
    refused: usize,
    tokens: usize,
}

impl Count {
    /// What an earlier call did of these requests.
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

    /// The same for requests that were refused now and for those that were refused by an earlier call.
    fn exit_code(self) -> ExitCode {
        if self.refused == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// The requests that are being answered.
struct Batch<'a> {
    engine: &'a Engine,
    args: &'a BatchArgs,
    /// Requests that were not answered before.
    left: usize,
    out: &'a mut Answers,
    crowd: Crowd,
    /// By their number: the custom_id, and what reads the answer.
    open: HashMap<usize, (String, Option<Parser>)>,
    count: Count,
}

impl<'a> Batch<'a> {
    fn new(engine: &'a Engine, args: &'a BatchArgs, left: usize, out: &'a mut Answers) -> Batch<'a> {
        let crowd = Crowd::new(engine, CrowdOptions::new(args.parallel));
        Batch { engine, args, left, out, crowd, open: HashMap::new(), count: Count::default() }
    }

    fn answer(&mut self, requests: &Requests, earlier: &Earlier, cancel: &Cancel) -> Result<Count> {
        let (finished, ended) = mpsc::channel();
        let name = self.engine.file().metadata.str("general.name").unwrap_or("model").to_owned();
        let mut lines = requests.lines()?.enumerate();
        // The next request, if there is no memory for it before others have been answered.
        let mut postponed = None;
        let bar = Progress::answering(self.left);
        let start = Instant::now();
        loop {
            // As many wait as are answered, so that nobody's place stays empty and the file is not in memory.
            while self.open.len() < self.args.parallel.saturating_mul(2) {
                cancel.check()?;
                let (number, line) = match postponed.take() {
                    Some(next) => next,
                    None => match lines.next() {
                        Some((number, line)) => (number, line?),
                        None => break,
                    },
                };
                if earlier.was_refused(files::name(&line.custom_id)).is_none()
                    && !self.add(number, &line, &finished)?
                {
                    postponed = Some((number, line));
                    break;
                }
            }
            if self.crowd.is_empty() {
                return Ok(self.count);
            }
            self.count.tokens += self.crowd.step(cancel)?;
            for (number, answer) in ended.try_iter() {
                let (id, parser) = self.open.remove(&number).expect("it was added");
                match answer {
                    Ok(answer) => {
                        self.count.answered += 1;
                        let request = format!("chatcmpl-{:016x}", hash(&id));
                        let body = completion(&request, now(), &name, parser, &answer);
                        self.out.write(&id, 200, &body)?;
                    }
                    // What is wrong with one request is said in its line; what is wrong with the machine ends the call,
                    // which goes on later.
                    Err(error @ (Error::Context { .. } | Error::Invalid(_) | Error::Unsupported(_))) => {
                        self.refuse(&id, &Refusal { message: error.to_string(), param: None, error: None })?;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            bar.set((self.count.answered + self.count.refused) as u64, self.left as u64);
            bar.say(format!("{:.1} tok/s", self.count.tokens as f64 / start.elapsed().as_secs_f64()));
        }
    }

    /// False if there is no memory for a request before others have been answered.
    fn add(&mut self, number: usize, line: &Line, finished: &Finished) -> Result<bool> {
        let Line { custom_id, url, body } = line;
        let prepared = Endpoint::of(url.as_deref())
            .and_then(|endpoint| Body::read(body.clone())?.request(self.engine, endpoint, hash(custom_id)));
        match prepared {
            Ok((mut request, parser)) => {
                request.max_tokens = request.max_tokens.or(self.args.max_tokens);
                self.open.insert(number, (custom_id.clone(), parser));
                let listener = Box::new(Reporter { number, to: finished.clone() });
                self.crowd.add(request, Cancel::default(), listener);
            }
            // That is no fault of the request's.
            Err(Refusal { error: Some(Error::Budget { .. }), .. }) if !self.crowd.is_empty() => {
                return Ok(false);
            }
            Err(Refusal { error: Some(error @ Error::Budget { .. }), .. }) => return Err(error.into()),
            Err(refusal) => self.refuse(custom_id, &refusal)?,
        }
        Ok(true)
    }

    fn refuse(&mut self, custom_id: &str, refusal: &Refusal) -> Result<()> {
        self.count.refused += 1;
        self.out.write(custom_id, 400, &refusal.body())
    }
}

/// Where answers go, each with its request's number.
type Finished = mpsc::Sender<(usize, forebay_engine::Result<Answer>)>;

/// Passes an answer on under its request's number.
struct Reporter {
    number: usize,
    to: Finished,
}

impl Listener for Reporter {
    fn event(&mut self, _: Event<'_>) {}

    fn end(self: Box<Self>, answer: forebay_engine::Result<Answer>) {
        // Nobody listens any more if the call is about to end.
        let _ = self.to.send((self.number, answer));
    }
}

/// A number that follows from a name, the same in every run.
fn hash(name: &str) -> u64 {
    Fnv::of(name.as_bytes())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
