//! `forebay batch`: many answers from one file to another.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use forebay_engine::chat::dialect::Parser;
use forebay_engine::{
    Answer, Cancel, Crowd, CrowdOptions, Engine, Error, Event, Fnv, Listener, private_options,
};
use serde::Deserialize;
use serde_json::{Value, json};

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
/// A call that was ended in the middle, by whatever, goes on when it is made again: what OUT holds is not computed again.
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

/// A line of the file of requests.
#[derive(Deserialize)]
struct Line {
    custom_id: String,
    #[serde(default)]
    url: Option<String>,
    body: Value,
}

/// Runs the command.
pub fn run(args: &BatchArgs) -> Result<ExitCode> {
    let lines = read_requests(&args.input)?;
    let (mut out, done) = Answers::open(&args.out)?;
    let left: Vec<&Line> = lines.iter().filter(|line| !done.contains_key(&line.custom_id)).collect();
    if left.is_empty() {
        print(&format!("{}: all {} requests have been answered\n", args.out.display(), lines.len()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let engine = args.load.load(&demo::or_demo(args.model.as_deref())?)?;
    let cancel = Cancel::default();
    interrupt::install(&cancel)?;
    let start = Instant::now();
    let count = match answer(&engine, args, &left, &mut out, &cancel) {
        Err(error) if matches!(error.downcast_ref(), Some(forebay_engine::Error::Cancelled)) => {
            eprintln!("stopped: the same call goes on where it was");
            return Ok(ExitCode::from(interrupt::EXIT_CODE));
        }
        other => other?,
    };
    let seconds = start.elapsed().as_secs_f64();
    let Count { answered, refused, tokens } = count;
    let before = lines.len() - left.len();
    let mut text = format!("{answered} requests answered");
    if before > 0 {
        text.push_str(&format!(", {before} had been before"));
    }
    if refused > 0 {
        text.push_str(&format!(", {refused} refused (see their lines)"));
    }
    let rate = tokens as f64 / seconds;
    print(&format!("{text} · {tokens} tokens written in {seconds:.1} s, {rate:.1} tok/s\n"))?;
    Ok(if refused == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What was done.
#[derive(Default)]
struct Count {
    answered: usize,
    refused: usize,
    tokens: usize,
}

fn answer(
    engine: &Engine,
    args: &BatchArgs,
    lines: &[&Line],
    out: &mut Answers,
    cancel: &Cancel,
) -> Result<Count> {
    let mut count = Count::default();
    let mut crowd = Crowd::new(engine, CrowdOptions::new(args.parallel));
    let (finished, ended) = mpsc::channel();
    let name = engine.file().metadata.str("general.name").unwrap_or("model").to_owned();
    let mut parsers = HashMap::new();
    for (number, line) in lines.iter().enumerate() {
        match request(engine, args, line) {
            Ok((request, parser)) => {
                parsers.insert(number, parser);
                let listener = Box::new(Reporter { number, to: finished.clone() });
                crowd.add(request, Cancel::default(), listener);
            }
            Err(refusal) => {
                count.refused += 1;
                out.write(&line.custom_id, 400, &refusal.body())?;
            }
        }
    }
    let bar = Progress::answering(lines.len());
    let start = Instant::now();
    while !crowd.is_empty() {
        count.tokens += crowd.step(cancel)?;
        for (number, answer) in ended.try_iter() {
            let id = &lines[number].custom_id;
            match answer {
                Ok(answer) => {
                    count.answered += 1;
                    let request = format!("chatcmpl-{:016x}", hash(id));
                    let parser = parsers.remove(&number).flatten();
                    let body = completion(&request, now(), &name, parser, &answer);
                    out.write(id, 200, &body)?;
                }
                // What is wrong with one request is said in its line; what is wrong with the machine ends the call, which
                // goes on later.
                Err(error @ (Error::Context { .. } | Error::Invalid(_) | Error::Unsupported(_))) => {
                    count.refused += 1;
                    let refusal = Refusal { message: error.to_string(), param: None, error: None };
                    out.write(id, 400, &refusal.body())?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        bar.set((count.answered + count.refused) as u64, lines.len() as u64);
        bar.say(format!("{:.1} tok/s", count.tokens as f64 / start.elapsed().as_secs_f64()));
    }
    Ok(count)
}

/// Passes an answer on under its request's number.
struct Reporter {
    number: usize,
    to: mpsc::Sender<(usize, forebay_engine::Result<Answer>)>,
}

impl Listener for Reporter {
    fn event(&mut self, _: Event<'_>) {}

    fn end(self: Box<Self>, answer: forebay_engine::Result<Answer>) {
        // Nobody listens any more if the call is about to end.
        let _ = self.to.send((self.number, answer));
    }
}

fn request(
    engine: &Engine,
    args: &BatchArgs,
    line: &Line,
) -> Result<(forebay_engine::Request, Option<Parser>), Refusal> {
    let endpoint = Endpoint::of(line.url.as_deref())?;
    let body = Body::read(line.body.clone())?;
    let (mut request, parser) = body.request(engine, endpoint, hash(&line.custom_id))?;
    request.max_tokens = request.max_tokens.or(args.max_tokens);
    Ok((request, parser))
}

/// The requests of a file, which have names of their own.
fn read_requests(path: &Path) -> Result<Vec<Line>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut lines: Vec<Line> = Vec::new();
    let mut seen: HashMap<String, usize> = HashMap::new();
    for (i, text) in BufReader::new(file).lines().enumerate() {
        let number = i + 1;
        let at = || format!("{}, line {number}", path.display());
        let text = text.with_context(|| format!("{}: cannot read it as text", at()))?;
        if text.trim().is_empty() {
            continue;
        }
        let line: Line = serde_json::from_str(&text)
            .with_context(|| format!("{}: not a request with custom_id and body", at()))?;
        if let Some(before) = seen.insert(line.custom_id.clone(), number) {
            bail!("{}: custom_id {:?} is that of line {before}, too", at(), line.custom_id);
        }
        lines.push(line);
    }
    ensure!(!lines.is_empty(), "{} has no requests", path.display());
    Ok(lines)
}

/// The file of answers, which grows by a line at a time.
struct Answers {
    file: File,
    path: PathBuf,
}

impl Answers {
    /// Opens the file and finds whose answers it holds. A line that was being written when the program ended is cut off.
    fn open(path: &Path) -> Result<(Answers, HashMap<String, usize>)> {
        let cannot = || format!("cannot write {}", path.display());
        let mut file = private_options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .with_context(cannot)?;
        let mut done = HashMap::new();
        let mut whole = 0;
        let mut reader = BufReader::new(&mut file);
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            if reader
                .read_until(b'\n', &mut line)
                .with_context(|| format!("cannot read {}", path.display()))?
                == 0
            {
                break;
            }
            let value: Option<Value> = serde_json::from_slice(&line).ok();
            let id = value.as_ref().and_then(|value| value.get("custom_id")?.as_str());
            match id {
                Some(id) if line.ends_with(b"\n") => {
                    done.insert(id.to_owned(), number);
                    whole += line.len() as u64;
                }
                // Only the last line can have been cut short.
                _ if !line.ends_with(b"\n") => break,
                _ => bail!("{}, line {number}: not an answer; is it another file?", path.display()),
            }
        }
        drop(reader);
        file.set_len(whole).and_then(|()| file.seek(SeekFrom::Start(whole))).with_context(cannot)?;
        Ok((Answers { file, path: path.to_owned() }, done))
    }

    /// Adds an answer.
    fn write(&mut self, custom_id: &str, status: u16, body: &Value) -> Result<()> {
        let name = format!("batch_req_{:016x}", hash(custom_id));
        let line = json!({
            "id": name,
            "custom_id": custom_id,
            "response": { "status_code": status, "request_id": name, "body": body },
            "error": null,
        });
        // One write for a line, so that a program that is ended leaves whole lines or one that is cut short.
        let written = self.file.write_all(format!("{line}\n").as_bytes());
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// A number that follows from a name, the same in every run.
fn hash(name: &str) -> u64 {
    Fnv::of(name.as_bytes())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
