//! `forebay bench`: measures how fast a model runs on this machine, and how close that is to the limit of its memory.

mod report;
mod tokens;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Instant, SystemTime};

use anyhow::Result;
use clap::Args;
use forebay_engine::internals::forecast::bound::TokenCost;
use forebay_engine::{Cancel, Engine, Session, TokenId, Turn};

use self::report::{Format, Row, Setting};
use crate::args::{ComputeArgs, ModelArgs};
use crate::errors;
use crate::memory_speed::memory_speed;
use crate::output::print;
use crate::progress::Progress;
use crate::values::at_least_one;

/// Measure how fast a model runs on this machine
///
/// Two kinds of tests, named as in llama-bench: `pp512` processes a prompt of 512 tokens, `tg128` generates 128 tokens one
/// at a time. With --depth, the context already holds that many tokens, which are not timed: `tg128 @ d4096`. With
/// --parallel, several answers are generated together: `tg128 x32` is the total speed of 32 conversations.
///
/// Every test runs once untimed and then -r times. The table shows tokens per second as mean ± standard deviation; csv and
/// json also contain the median, which a busy machine disturbs less, and json has llama-bench's field names, too. Tokens are
/// pseudo-random, the same in every run, and generated tokens are not fed back.
///
/// If experts are streamed, the first run is a row of its own (cold). The rows then also show the cache hit rate, the bytes
/// read from the drive per token, and the limit: the speed at which the slowest of drive and memory can deliver the experts,
/// added to the time of everything else. On a GPU, the limit is the slowest of PCIe, drive and GPU memory.
///
/// Generation is limited by memory bandwidth, so the table shows the bytes read per token, the resulting GB/s, and its share
/// of the memory bandwidth that is measured at the start. Prompt processing shares these reads among its tokens, so it has no
/// such value.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay bench model.gguf                          pp512 and tg128
  forebay bench model.gguf -p 0 -n 64 -d 0,4096     generation, at two depths
  forebay bench model.gguf -p 64,512 -n 0 -t 4      prompt processing, with 4 threads
  forebay bench model.gguf -p 0 --parallel 1,8,32   1, 8 and 32 answers at a time
  forebay bench model.gguf -o jsonl >> results.jsonl")]
pub struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt lengths in tokens; 0 for none
    #[arg(short = 'p', long, visible_alias = "n-prompt", value_name = "N,…", value_delimiter = ',', default_value = "512",
        help_heading = TESTS)]
    prompt: Vec<usize>,
    /// Numbers of tokens to generate; 0 for none
    #[arg(short = 'n', long, visible_alias = "n-gen", value_name = "N,…", value_delimiter = ',', default_value = "128",
        help_heading = TESTS)]
    generate: Vec<usize>,
    /// Tokens in the context before each test
    #[arg(short, long, visible_alias = "n-depth", value_name = "N,…", value_delimiter = ',', default_value = "0",
        help_heading = TESTS)]
    depth: Vec<usize>,
    /// Numbers of answers to generate together
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = at_least_one, default_value = "1",
        help_heading = TESTS)]
    parallel: Vec<usize>,
    /// Timed runs of each test
    #[arg(short, long, value_name = "N", value_parser = at_least_one, default_value = "5", help_heading = TESTS)]
    repetitions: usize,
    /// File of token numbers to use, separated by spaces or commas, repeated as needed [default: pseudo-random tokens]
    #[arg(long, value_name = "FILE", help_heading = TESTS)]
    tokens: Option<PathBuf>,
    /// Format of the results, on standard output
    #[arg(short, long, value_name = "FORMAT", value_enum, default_value = "md", help_heading = "Output")]
    output: Format,
    #[command(flatten)]
    compute: ComputeArgs,
}

const TESTS: &str = "Tests";

/// The most answers at a time: more do not fit into one step of every model.
const MOST_TOGETHER: usize = 256;

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<ExitCode> {
    let tests = args.tests();
    let Some(longest) = tests.iter().map(Test::length).max() else {
        return Err(errors::usage("there is nothing to measure: -p and -n are both 0"));
    };
    let most = tests.iter().map(|test| test.answers).fold(1, usize::max);
    if most > MOST_TOGETHER {
        return Err(errors::usage(format!(
            "--parallel {most}: at most {MOST_TOGETHER} answers can be generated together"
        )));
    }
    // A step has at most as many tokens as a context.
    let context = longest.max(most);
    let (engine, gpu) = args.compute.load_on(&args.model.locate()?, Some(context))?;
    let count = tests.iter().map(|test| test.length() * test.answers).max().unwrap_or(0);
    let tokens = match &args.tokens {
        Some(path) => tokens::from_file(path, engine.vocab_size(), count)?,
        None => tokens::random(engine.vocab_size(), count),
    };
    let bar = Progress::measuring();
    bar.say("preparing memory".into());
    engine.settle();
    bar.say("memory and drive bandwidth".into());
    let speeds = engine.speeds()?;
    let bandwidth = match (speeds.memory, &gpu) {
        (Some(speed), _) => speed,
        (None, Some(gpu)) => gpu.device.memory_speed()?,
        (None, None) => memory_speed(engine.threads())?,
    };
    drop(bar);

    let setting = Setting::new(&engine, args.compute.precision(), bandwidth, &speeds);
    print(&args.output.begin(&setting))?;
    let mut rows = Vec::new();
    for test in tests {
        let start = SystemTime::now();
        let measured = test.measure(&engine, &tokens, args.repetitions)?;
        for row in Row::of(&engine, test, start, measured) {
            print(&args.output.row(&setting, &row))?;
            rows.push(row);
        }
    }
    print(&args.output.end(&setting, &rows))?;
    Ok(ExitCode::SUCCESS)
}

impl BenchArgs {
    fn tests(&self) -> Vec<Test> {
        let mut tests = Vec::new();
        for &depth in &self.depth {
            let test = |kind, tokens, answers| Test { kind, tokens, depth, answers };
            tests.extend(self.prompt.iter().map(|&tokens| test(TestKind::Prompt, tokens, 1)));
            for &tokens in &self.generate {
                tests
                    .extend(self.parallel.iter().map(|&answers| test(TestKind::Generation, tokens, answers)));
            }
        }
        tests.retain(|test| test.tokens > 0);
        tests
    }
}

/// A kind of test.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TestKind {
    /// Prompt processing: tokens computed together.
    Prompt,
    /// Generation: tokens computed one after the other.
    Generation,
}

/// The result of one run.
struct Sample {
    tokens_per_second: f64,
    cost: TokenCost,
}

/// One test.
#[derive(Clone, Copy)]
struct Test {
    kind: TestKind,
    /// Timed tokens per conversation.
    tokens: usize,
    /// Tokens in a conversation before the test.
    depth: usize,
    /// Conversations that are computed together.
    answers: usize,
}

impl Test {
    fn name(&self) -> String {
        let kind = match self.kind {
            TestKind::Prompt => "pp",
            TestKind::Generation => "tg",
        };
        let mut name = format!("{kind}{}", self.tokens);
        if self.answers > 1 {
            name += &format!(" x{}", self.answers);
        }
        if self.depth > 0 {
            name += &format!(" @ d{}", self.depth);
        }
        name
    }

    /// Tokens in a conversation after the test.
    fn length(&self) -> usize {
        self.depth.saturating_add(self.tokens)
    }

    /// The tokens of each conversation.
    fn texts<'a>(&self, tokens: &'a [TokenId]) -> Vec<&'a [TokenId]> {
        tokens.chunks_exact(self.length()).take(self.answers).collect()
    }

    /// One run with the caches as they are, and `runs` after it.
    fn measure(&self, engine: &Engine, tokens: &[TokenId], runs: usize) -> Result<Vec<Sample>> {
        let bar = Progress::measuring();
        let texts = self.texts(tokens);
        let mut sessions: Vec<Session> = Vec::new();
        let mut samples = Vec::new();
        // The first run warms the caches. It counts only if experts are streamed, as the cold run.
        for run in 0..=runs {
            bar.say(match run {
                0 => format!("{}, first run", self.name()),
                _ => format!("{}, run {run} of {runs}", self.name()),
            });
            if self.depth == 0 || sessions.is_empty() {
                sessions = texts.iter().map(|_| engine.session()).collect();
            }
            if self.depth > 0 {
                for (session, text) in sessions.iter_mut().zip(&texts) {
                    session.extend(&text[..self.depth])?;
                }
            }
            let before = engine.meters();
            let start = Instant::now();
            self.compute(engine, &mut sessions, &texts)?;
            let seconds = start.elapsed().as_secs_f64();
            let experts = engine.meters() - before;
            let tokens = self.tokens * self.answers;
            samples.push(Sample {
                tokens_per_second: tokens as f64 / seconds,
                cost: TokenCost::new(tokens, seconds, &experts),
            });
        }
        Ok(samples)
    }

    /// Computes the next tokens of the conversations.
    fn compute(&self, engine: &Engine, sessions: &mut [Session], texts: &[&[TokenId]]) -> Result<()> {
        match (self.kind, &mut *sessions) {
            (TestKind::Prompt, sessions) => {
                for (session, text) in sessions.iter_mut().zip(texts) {
                    session.extend(text)?;
                }
            }
            (TestKind::Generation, sessions) => {
                for at in self.depth..self.length() {
                    let turns = sessions.iter_mut().zip(texts).map(|(session, text)| Turn {
                        session,
                        tokens: &text[at..=at],
                        logits: true,
                        marks: &[],
                    });
                    let mut turns: Vec<_> = turns.collect();
                    let mut step = engine.step(&mut turns, &Cancel::default())?;
                    while let Some((_, mut logits)) = step.next_row()? {
                        // Generation reads the likeliest tokens, whatever is chosen among them.
                        logits.best()?;
                    }
                    step.finish()?;
                }
            }
        }
        Ok(())
    }

    /// Whether each token is computed alone, so that the bytes that it reads are known.
    fn one_by_one(&self) -> bool {
        self.kind == TestKind::Generation && self.answers == 1
    }

    /// The bytes that the middle token of the test reads; for tests that compute each token alone.
    fn bytes_per_token(&self, engine: &Engine) -> Option<u64> {
        let (depth, tokens) = (self.depth as u64, self.tokens as u64);
        // A token attends to itself, too.
        self.one_by_one().then(|| engine.traffic().bytes(depth + tokens.div_ceil(2)))
    }
}

#[cfg(test)]
mod tests {
    use forebay_engine::Options;

    use super::*;

    #[test]
    fn every_conversation_computes_its_own_tokens() {
        let path =
            PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
        let engine = Engine::open(&path, &Options::default().threads(1)).unwrap();
        for (kind, answers) in [(TestKind::Prompt, 1), (TestKind::Generation, 1), (TestKind::Generation, 3)] {
            let test = Test { kind, tokens: 4, depth: 2, answers };
            let tokens = tokens::random(engine.vocab_size(), 18);
            let texts = test.texts(&tokens);
            assert_eq!(texts.concat(), tokens[..6 * answers]);
            let mut sessions: Vec<Session> = texts.iter().map(|_| engine.session()).collect();
            for (session, text) in sessions.iter_mut().zip(&texts) {
                session.extend(&text[..2]).unwrap();
            }
            test.compute(&engine, &mut sessions, &texts).unwrap();
            assert!(sessions.iter().map(Session::tokens).eq(texts), "{}", test.name());
        }
    }
}
