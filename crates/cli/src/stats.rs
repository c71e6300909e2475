//! The figures of a run: a line for people, an object for programs.

use std::io::IsTerminal;

use forebay_engine::internals::experts::Meters;
use forebay_engine::internals::forecast::bound::{Bound, TokenCost};
use forebay_engine::internals::memory::of_process;
use forebay_engine::{Answer, Engine, FinishReason, Reply, Stats};
use serde_json::{Value, json};

use crate::wrap::tell;

/// Writes the line after an answer to standard error, if that is a terminal.
pub fn close(engine: &Engine, answer: &Answer) {
    // An answer that was stopped during its prompt has no figures.
    let begun = answer.finish_reason != FinishReason::Cancelled || !answer.tokens.is_empty();
    if begun && std::io::stderr().is_terminal() {
        tell(&format!("\n{}", line_of(engine, answer)));
    }
}

/// The line for an answer.
pub fn line_of(engine: &Engine, answer: &Answer) -> String {
    let streams = engine.plan().moves_experts();
    line(&answer.stats, streams, bound(engine, &answer.stats))
}

/// The limit of the generation speed, and the share of it that was reached.
fn bound(engine: &Engine, stats: &Stats) -> Option<(Bound, f64)> {
    if stats.decode_steps == 0 {
        return None;
    }
    // If the drive cannot be measured, the answer is still valid.
    let speeds = engine.speeds().ok()?;
    let cost = TokenCost::new(stats.decode_steps, stats.decode_seconds, &stats.experts);
    let bound = Bound::of(&cost, &speeds)?;
    Some((bound, bound.ratio(&cost)))
}

/// The legend of the line, for help.
pub const LEGEND: [(&str, &str); 5] = [
    ("prompt", "tokens processed for this answer, those that were cached, and the time"),
    ("answer", "tokens generated, and tokens per second"),
    ("cache hit rate", "share of experts that were in memory when they were needed"),
    ("read", "bytes read from the drive while the answer was generated"),
    (
        "drive-bound (80 %)",
        "what limits the speed (drive, PCIe or memory), and how close it is to that limit",
    ),
];

fn line(stats: &Stats, streams: bool, bound: Option<(Bound, f64)>) -> String {
    let computed = stats.prompt_tokens - stats.reused_tokens;
    let cached = match stats.reused_tokens {
        0 => String::new(),
        reused => format!(" ({reused} cached)"),
    };
    let mut parts = vec![format!("prompt {}{cached} in {}", tokens(computed), time(stats.prompt_seconds))];
    if stats.generated_tokens > 0 {
        let speed = match stats.decode_steps {
            0 => String::new(),
            _ => format!(", {} tok/s", speed(stats.steps_per_second())),
        };
        parts.push(format!("answer {}{speed}", tokens(stats.generated_tokens)));
    }
    let experts = &stats.experts;
    if let Some(hit_rate) = experts.hit_rate().filter(|_| streams) {
        match experts.device_hit_rate().filter(|_| experts.bytes_lifted > 0) {
            Some(on_gpu) => {
                let (on_gpu, in_memory) = (100.0 * on_gpu, 100.0 * (hit_rate - on_gpu));
                parts.push(format!("experts {on_gpu:.0} % in GPU memory, {in_memory:.0} % in RAM"));
                parts.push(format!("uploaded {}", decimal(experts.bytes_lifted as f64)));
            }
            None => parts.push(format!("cache hit rate {:.0} %", hit_rate * 100.0)),
        }
        parts.push(format!("read {}", decimal(experts.bytes_read as f64)));
        if experts.computed_in_memory > 0 {
            let all = experts.hits + experts.misses;
            let share = 100.0 * experts.computed_in_memory as f64 / all as f64;
            parts.push(format!("{share:.0} % of experts computed on the CPU (bits may differ)"));
        }
    }
    if let Some((bound, ratio)) = bound {
        parts.push(format!("{}-bound ({:.0} %)", bound.by.name(), 100.0 * ratio));
    }
    parts.join(" · ")
}

fn tokens(count: usize) -> String {
    if count == 1 { "1 token".into() } else { format!("{count} tokens") }
}

/// `6.2`, or `476` without the fraction.
fn speed(tokens_per_second: f64) -> String {
    let digits = usize::from(tokens_per_second < 99.95);
    format!("{tokens_per_second:.digits$}")
}

/// `120 ms`, or `2.1 s` from a second on.
fn time(seconds: f64) -> String {
    if seconds < 0.9995 { format!("{:.0} ms", 1e3 * seconds) } else { format!("{seconds:.1} s") }
}

/// `1.2 GB`, or `340 MB` below 1 GB: in powers of ten, like the sizes and speeds of drives.
fn decimal(bytes: f64) -> String {
    if bytes >= 1e9 {
        format!("{:.1} GB", bytes / 1e9)
    } else if bytes >= 1e7 || bytes == 0.0 {
        format!("{:.0} MB", bytes / 1e6)
    } else {
        format!("{:.1} MB", bytes / 1e6)
    }
}

/// An answer as JSON.
pub fn answer(engine: &Engine, reply: &Reply) -> Value {
    let answer = &reply.answer;
    let stats = &answer.stats;
    let computed = stats.prompt_tokens - stats.reused_tokens;
    let bound = bound(engine, stats).map(|(bound, ratio)| {
        json!({ "name": bound.by.name(), "tokens_per_second": bound.tokens_per_second, "ratio": ratio })
    });
    json!({
        "text": reply.content,
        "reasoning": (!reply.reasoning.is_empty()).then_some(&reply.reasoning),
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason.name(),
        "seed": answer.seed,
        "stats": {
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
            "prompt_seconds": stats.prompt_seconds,
            "prompt_tokens_per_second": rate(computed, stats.prompt_seconds),
            "generated_tokens": stats.generated_tokens,
            "decode_steps": stats.decode_steps,
            "decode_seconds": stats.decode_seconds,
            "tokens_per_second": rate(stats.decode_steps, stats.decode_seconds),
            "ttft_seconds": stats.ttft_seconds,
            "experts": experts(&stats.experts, stats.decode_steps),
            "prompt_experts": experts(&stats.prompt_experts, computed),
            "memory": {
                "budget": engine.plan().budget,
                "planned": engine.plan().total(),
                "expert_slots": engine.slot_bytes(),
                "peak_rss": peak_rss(),
            },
            "bound": bound,
        },
    })
}

/// The counters of the expert store for this many tokens.
fn experts(meters: &Meters, tokens: usize) -> Value {
    json!({
        "hits": meters.hits,
        "gpu_hits": meters.device_hits,
        "cpu_experts": meters.computed_in_memory,
        "misses": meters.misses,
        "hit_rate": meters.hit_rate(),
        "bytes_read": meters.bytes_read,
        "bytes_per_token": (tokens > 0).then(|| meters.bytes_read as f64 / tokens as f64),
        "bytes_lifted": meters.bytes_lifted,
        "copy_wait_seconds": meters.copy_wait_seconds,
        "sent_ahead": meters.sent_ahead,
        "sent_ahead_used": meters.sent_used,
        "prefetches": meters.prefetches,
        "prefetches_used": meters.prefetch_used,
        "read_seconds": meters.read_seconds,
        "wait_seconds": meters.wait_seconds,
    })
}

/// The most memory this process has had resident, in bytes, where the operating system tells.
fn peak_rss() -> Option<u64> {
    of_process("VmHWM:")
}

/// Tokens per second; `None` without tokens.
fn rate(tokens: usize, seconds: f64) -> Option<f64> {
    (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use expect_test::expect_file;
    use forebay_engine::internals::forecast::bound::Bottleneck;

    use super::*;

    #[test]
    fn the_line_counts_what_was_computed() {
        let stats = Stats {
            prompt_tokens: 30,
            reused_tokens: 10,
            prompt_seconds: 0.5,
            generated_tokens: 51,
            decode_steps: 50,
            decode_seconds: 4.0,
            ttft_seconds: 0.5,
            experts: Meters {
                hits: 3,
                misses: 1,
                bytes_read: 100 << 20,
                wait_seconds: 2.0,
                ..Meters::default()
            },
            ..Stats::default()
        };
        let bound = Bound { by: Bottleneck::Drive, tokens_per_second: 15.0 };
        let gpu = Meters { hits: 9, misses: 1, device_hits: 6, bytes_lifted: 50 << 20, ..Meters::default() };
        let cpu = Meters { computed_in_memory: 2, ..gpu };
        let much = Meters { bytes_read: 23 << 30, ..stats.experts };
        let nothing = Stats { generated_tokens: 0, decode_steps: 0, experts: Meters::default(), ..stats };
        let one = Stats {
            reused_tokens: 29,
            prompt_seconds: 1.25,
            generated_tokens: 1,
            decode_steps: 0,
            experts: Meters::default(),
            ..stats
        };
        let fast = Stats { decode_seconds: 0.105, experts: Meters::default(), ..stats };
        let lines = [
            ("resident", line(&Stats { reused_tokens: 0, ..stats }, false, None)),
            ("streamed", line(&stats, true, Some((bound, 0.83)))),
            ("much is read", line(&Stats { experts: much, ..stats }, true, None)),
            ("on a GPU", line(&Stats { experts: gpu, ..stats }, true, None)),
            ("with --cpu-experts", line(&Stats { experts: cpu, ..stats }, true, None)),
            ("fast", line(&fast, false, None)),
            ("one token", line(&one, true, None)),
            ("nothing generated", line(&nothing, true, None)),
        ];
        let lines: String = lines.map(|(case, line)| format!("{case}:\n  {line}\n")).concat();
        expect_file!["../tests/snapshots/answer_lines.txt"].assert_eq(&lines);
    }
}
