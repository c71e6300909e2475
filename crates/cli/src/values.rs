//! The values of flags: how they are read, and which there are, for help and completions.

use anyhow::{Result, anyhow};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use forebay_engine::Bytes;
use forebay_engine::internals::experts::IoMethod;
use forebay_engine::internals::experts::policy::PolicyKind;
use forebay_engine::plan::ExpertMemory;

/// Reads a number of bytes: `8G`, `1.5GiB`, `512M`, `4096`.
pub fn size(s: &str) -> Result<u64> {
    Ok(s.parse::<Bytes>()?.0)
}

/// Reads an amount of memory. `6` is refused: it means 6 bytes, and whoever writes it means 6G.
pub fn memory(s: &str) -> Result<u64> {
    Ok(Bytes::of_memory(s)?.0)
}

/// Reads a limit for experts: an amount of memory or a percentage.
pub fn expert_memory(s: &str) -> Result<ExpertMemory> {
    Ok(s.parse()?)
}

/// Reads a number.
pub fn at_least_one(s: &str) -> Result<usize> {
    match s.parse() {
        Ok(0) => Err(anyhow!("at least 1 is needed")),
        Ok(n) => Ok(n),
        Err(_) => Err(anyhow!("not a whole number")),
    }
}

/// Reads `on` or `off`.
pub fn on_off() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["on", "off"]).map(|s| s == "on")
}

/// Reads how experts are read.
pub fn io() -> impl TypedValueParser<Value = IoMethod> {
    let values = IoMethod::ALL.map(|method| {
        PossibleValue::new(method.name()).help(match method {
            IoMethod::Auto => "io_uring if the system allows it, otherwise a thread pool",
            IoMethod::Uring => "io_uring with direct reads, or an error (Linux)",
            IoMethod::Pool => "A pool of threads",
            IoMethod::Mmap => "Memory-mapped files, for comparison: the page cache is outside the budget",
        })
    });
    PossibleValuesParser::new(values).try_map(|s| s.parse())
}

/// Reads an eviction policy.
pub fn policy() -> impl TypedValueParser<Value = PolicyKind> {
    let values = PolicyKind::ALL.map(|kind| {
        PossibleValue::new(kind.name()).help(match kind {
            PolicyKind::Lru => "Evict the least recently used expert",
            PolicyKind::Lfu => "Evict the least frequently used expert; recent uses count more",
            PolicyKind::Forecast => "Evict the expert least likely to be needed before its layer runs again",
        })
    });
    PossibleValuesParser::new(values).map(|s| PolicyKind::parse(&s).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_value_is_read() {
        for method in IoMethod::ALL {
            let read = io().parse_ref(&clap::Command::new(""), None, method.name().as_ref());
            assert_eq!(read.unwrap(), method);
        }
        for kind in PolicyKind::ALL {
            let read = policy().parse_ref(&clap::Command::new(""), None, kind.name().as_ref());
            assert_eq!(read.unwrap(), kind);
        }
    }
}
