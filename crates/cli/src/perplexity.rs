//! `forebay perplexity`: measures how well a model predicts a text.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use clap::Args;
use forebay_engine::internals::format::ModelFile;
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{Session, TokenId};
use serde_json::json;

use crate::args::{ComputeArgs, ModelArgs, read_text};
use crate::inspect::Summary;
use crate::output::print;
use crate::progress::Progress;
use crate::values::at_least_one;
use crate::{errors, interrupt};

/// The default number of tokens per window.
const DEFAULT_WINDOW: usize = 512;

/// Measure how well a model predicts a text
///
/// Perplexity is e to the mean of −log p(token); lower is better. A model that always hesitates between 8 equally likely
/// tokens has perplexity 8. Compare quantisations of a model, or --exact with the default, on the same text and window.
/// Do not compare models with different vocabularies. The value after ± is one standard error; the range after it is the
/// 95 % confidence interval.
///
/// The text is cut into windows that do not overlap. In each window, every token but the first is predicted from the
/// tokens before it. A shorter window at the end counts if it has at least two tokens. If the model asks for a BOS token,
/// it replaces the first token of each window, as in llama.cpp. llama.cpp's own tool scores only the second half of each
/// window, so its value is lower.
#[derive(Args)]
#[command(after_help = "\
Examples:
  forebay perplexity model.gguf -f wiki.test.raw
  forebay perplexity model.gguf -f wiki.test.raw --ctx 2048 --exact
  forebay perplexity model.gguf -f story.txt --json | jq .perplexity")]
pub struct PerplexityArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Text file, in UTF-8
    #[arg(short, long, visible_alias = "prompt-file", value_name = "FILE", help_heading = "Text")]
    file: PathBuf,
    /// Window size in tokens [default: 512, or the model's maximum if that is smaller]
    #[arg(short, long, visible_alias = "ctx-size", value_name = "N", value_parser = at_least_one, help_heading = "Text")]
    ctx: Option<usize>,
    /// Print one JSON object: perplexity, error, interval, tokens, windows, ctx, seconds
    #[arg(long, help_heading = "Output")]
    json: bool,
    #[command(flatten)]
    compute: ComputeArgs,
}

/// Runs the command.
pub fn run(args: &PerplexityArgs) -> Result<ExitCode> {
    if args.ctx == Some(1) {
        return Err(errors::usage("a window of 1 token predicts nothing: --ctx needs at least 2"));
    }
    let text = read_text(&args.file)?;
    let path = args.model.locate()?;
    let window = match args.ctx {
        Some(window) => window,
        None => {
            let limit = Summary::new(&ModelFile::open(&path)?).context.unwrap_or(u64::MAX);
            DEFAULT_WINDOW.min(usize::try_from(limit).unwrap_or(usize::MAX))
        }
    };
    let engine = args.compute.load(&path, Some(window))?;
    let tokenizer = engine.tokenizer();
    let tokens = tokenizer.encode(&text, EncodeOptions { special: false, bos: Bos::AsFileSays })?;
    if tokens.len() < 2 {
        let (path, count) = (args.file.display(), tokens.len());
        bail!(
            "{path} is too short: it has {count} of the 2 tokens that a prediction needs; use a longer text"
        );
    }
    let text = Text { tokens, window, bos: tokenizer.bos().filter(|_| tokenizer.adds_bos()) };

    let mut session = engine.session();
    interrupt::install(session.cancel())?;
    let start = Instant::now();
    let score = text.score(&mut session)?;
    let seconds = start.elapsed().as_secs_f64();
    let (perplexity, error) = (score.perplexity(), score.error());
    ensure!(
        perplexity.is_finite(),
        "the perplexity is not a number: the model computed NaN or infinite logits; check the file with `forebay run`"
    );
    let (tokens, windows) = (score.count, text.windows().count());
    print(&if args.json {
        let object = json!({
            "perplexity": perplexity,
            "error": error,
            "interval": score.interval(),
            "tokens": tokens,
            "windows": windows,
            "ctx": window,
            "seconds": seconds,
        });
        format!("{object:#}\n")
    } else {
        let plural = if windows == 1 { "" } else { "s" };
        let interval = score.interval().map(|[low, high]| format!(" (95 %: {low:.4} to {high:.4})"));
        format!(
            "perplexity {}{} · {tokens} tokens in {windows} window{plural} of {window}\n",
            score.text(),
            interval.unwrap_or_default()
        )
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The text, cut into windows.
struct Text {
    tokens: Vec<TokenId>,
    /// Tokens per window.
    window: usize,
    /// Replaces the first token of each window.
    bos: Option<TokenId>,
}

impl Text {
    /// The windows. A single token at the end predicts nothing and is left out.
    fn windows(&self) -> impl Iterator<Item = Vec<TokenId>> {
        self.tokens.chunks(self.window).filter(|w| w.len() > 1).map(|window| {
            let mut window = window.to_vec();
            window[0] = self.bos.unwrap_or(window[0]);
            window
        })
    }

    fn score(&self, session: &mut Session) -> Result<Score> {
        let engine = session.engine().clone();
        let mut score = Score::default();
        let total: usize = self.windows().map(|w| w.len()).sum();
        let mut done = 0;
        let bar = Progress::scoring(total);
        for window in self.windows() {
            let mut rows = engine.all_logits(session, &window)?;
            while let Some((position, logits)) = rows.next_row()? {
                if let Some(next) = window.get(position + 1) {
                    score.add(surprise(logits, *next));
                }
                bar.set((done + position + 1) as u64, total as u64);
            }
            done += window.len();
            bar.say(score.text());
        }
        Ok(score)
    }
}

/// −log p(token), where the probabilities are the softmax of the logits.
fn surprise(logits: &[f32], token: TokenId) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    sum.ln() - f64::from(logits[token.0 as usize] - max)
}

/// The surprises so far: their number, their mean, and the sum of the squares of their distances from it.
#[derive(Default)]
struct Score {
    count: usize,
    mean: f64,
    squares: f64,
}

impl Score {
    /// Adds a surprise, by Welford's method: the squares of a million numbers would lose the digits that matter.
    fn add(&mut self, surprise: f64) {
        self.count += 1;
        let before = surprise - self.mean;
        self.mean += before / self.count as f64;
        self.squares += before * (surprise - self.mean);
    }

    fn perplexity(&self) -> f64 {
        self.mean.exp()
    }

    /// One standard error of the perplexity: that of the mean, times the slope of the exponential there. One
    /// prediction has none.
    fn error(&self) -> Option<f64> {
        let n = self.count as f64;
        (self.count > 1).then(|| (self.squares / (n - 1.0) / n).sqrt() * self.perplexity())
    }

    /// Where the perplexity of 19 of 20 such texts lies: 1.96 standard errors of the mean to both sides.
    fn interval(&self) -> Option<[f64; 2]> {
        let error = self.error()? / self.perplexity();
        Some([-1.96, 1.96].map(|errors| (self.mean + errors * error).exp()))
    }

    fn text(&self) -> String {
        match self.error() {
            Some(error) => format!("{:.4} ± {error:.4}", self.perplexity()),
            None => format!("{:.4}", self.perplexity()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_surprise_is_minus_the_logarithm_of_the_softmax() {
        // Probabilities 1/2, 1/4, 1/4, whatever is added to all logits, also where their exponentials overflow.
        for shift in [0.0, -700.0, 5000.0] {
            let logits = [2f32.ln() + shift, shift, shift];
            assert!((surprise(&logits, TokenId(0)) - 2f64.ln()).abs() < 1e-3);
            assert!((surprise(&logits, TokenId(2)) - 4f64.ln()).abs() < 1e-3);
        }
        assert!((surprise(&[0.0; 8], TokenId(3)) - 8f64.ln()).abs() < 1e-15);
        assert!(surprise(&[f32::NAN, 0.0], TokenId(1)).is_nan());
    }

    #[test]
    fn the_error_is_that_of_the_mean_times_the_slope() {
        let mut score = Score::default();
        [1.0, 2.0, 3.0, 6.0].into_iter().for_each(|s| score.add(s));
        assert!((score.perplexity() - 3f64.exp()).abs() < 1e-12);
        // Squared distances 4 + 1 + 0 + 9, divided by 3 and by 4.
        assert!((score.error().unwrap() - (14.0f64 / 12.0).sqrt() * 3f64.exp()).abs() < 1e-12);
        let [low, high] = score.interval().unwrap();
        let distance = 1.96 * (14.0f64 / 12.0).sqrt();
        assert!((low.ln() - 3.0 + distance).abs() < 1e-12 && (high.ln() - 3.0 - distance).abs() < 1e-12);
        let mut one = Score::default();
        one.add(0.0);
        assert_eq!(one.interval(), None);
        assert_eq!((one.error(), one.text().as_str()), (None, "1.0000"));
    }

    #[test]
    fn windows_begin_with_bos_where_the_file_asks_for_it() {
        let tokens: Vec<_> = (0..9).map(TokenId).collect();
        let windows = |window, bos| -> Vec<Vec<u32>> {
            let text = Text { tokens: tokens.clone(), window, bos };
            text.windows().map(|w| w.iter().map(|t| t.0).collect()).collect()
        };
        assert_eq!(windows(4, None), [[0, 1, 2, 3], [4, 5, 6, 7]]);
        assert_eq!(windows(7, Some(TokenId(99))), [vec![99, 1, 2, 3, 4, 5, 6], vec![99, 8]]);
    }
}
