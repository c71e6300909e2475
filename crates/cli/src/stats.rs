//! What a run took: a line for people, an object for machines.

use std::io::IsTerminal;

use forebay_engine::{Answer, FinishReason, Stats};
use serde_json::{Value, json};

/// Closes an answer with a line on stderr, where that is a terminal.
pub fn close(answer: &Answer) {
    // An answer that was stopped while its prompt was read has nothing to measure.
    let begun = answer.finish_reason != FinishReason::Cancelled || !answer.tokens.is_empty();
    if begun && std::io::stderr().is_terminal() {
        eprintln!("\n{}", line(&answer.stats));
    }
}

fn line(stats: &Stats) -> String {
    let mut parts = Vec::new();
    if stats.generated_tokens > 0 {
        parts.push(format!("{:.1} tok/s", rate(stats.generated_tokens, stats.decode_seconds)));
        parts.push(format!("first token {:.1} s", stats.ttft_seconds));
    }
    let computed = stats.prompt_tokens - stats.reused_tokens;
    parts.push(format!("prompt {computed} tok at {:.0} tok/s", rate(computed, stats.prompt_seconds)));
    parts.join(" · ")
}

/// An answer as JSON.
pub fn answer(answer: &Answer) -> Value {
    let stats = &answer.stats;
    json!({
        "text": answer.text,
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason.name(),
        "seed": answer.seed,
        "stats": {
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
            "prompt_seconds": stats.prompt_seconds,
            "generated_tokens": stats.generated_tokens,
            "decode_seconds": stats.decode_seconds,
            "ttft_seconds": stats.ttft_seconds,
            "memory": { "peak_rss": peak_rss() },
        },
    })
}

/// The most memory this process has had resident, in bytes, where the operating system tells.
fn peak_rss() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn rate(tokens: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_counts_what_was_computed() {
        let stats = Stats {
            prompt_tokens: 30,
            reused_tokens: 10,
            prompt_seconds: 0.5,
            generated_tokens: 50,
            decode_seconds: 4.0,
            ttft_seconds: 0.5,
        };
        assert_eq!(line(&stats), "12.5 tok/s · first token 0.5 s · prompt 20 tok at 40 tok/s");
        let nothing = Stats { generated_tokens: 0, ..stats };
        assert_eq!(line(&nothing), "prompt 20 tok at 40 tok/s");
    }
}
