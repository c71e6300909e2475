//! The values of flags: how they are read, and which there are, for help and completions.

use anyhow::{Result, anyhow};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use forebay_engine::internals::experts::IoMethod;
use forebay_engine::internals::experts::policy::PolicyKind;
use forebay_engine::plan::ExpertMemory;

/// Below this many bytes, a number without a unit is a number of something else.
const LEAST_WITHOUT_UNIT: u64 = 1 << 20;

/// Reads a number of bytes: `8G`, `1.5GiB`, `512M`, `4096`.
pub fn size(s: &str) -> Result<u64> {
    let text = s.trim().to_ascii_uppercase();
    let text = text.strip_suffix("IB").or_else(|| text.strip_suffix('B')).unwrap_or(&text);
    let units = [('K', 1u64 << 10), ('M', 1 << 20), ('G', 1 << 30), ('T', 1 << 40)];
    let (number, unit) = units
        .into_iter()
        .find_map(|(letter, unit)| Some((text.strip_suffix(letter)?, unit)))
        .unwrap_or((text, 1));
    match number.trim().parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok((number * unit as f64) as u64),
        _ => Err(anyhow!("expected a size, such as 8G or 512M")),
    }
}

/// Reads an amount of memory. `6` is refused: it means 6 bytes, and whoever writes it means 6G.
pub fn memory(s: &str) -> Result<u64> {
    let bytes = size(s)?;
    if bytes < LEAST_WITHOUT_UNIT && s.trim().parse::<f64>().is_ok() {
        let meant = if bytes < 4096 { 'G' } else { 'K' };
        return Err(anyhow!("{0} bytes is too small; did you mean {0}{meant}?", s.trim()));
    }
    Ok(bytes)
}

/// Reads a limit for experts: an amount of memory or a percentage.
pub fn expert_memory(s: &str) -> Result<ExpertMemory> {
    let Some(number) = s.trim().strip_suffix('%') else { return memory(s).map(ExpertMemory::Bytes) };
    match number.trim().parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(ExpertMemory::Percent(percent)),
        _ => Err(anyhow!("expected a percentage above 0 and up to 100")),
    }
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
    fn sizes_are_powers_of_1024() {
        assert_eq!(size("4096").unwrap(), 4096);
        assert_eq!(size("8G").unwrap(), 8 << 30);
        assert_eq!(size("1.5gib").unwrap(), 3 << 29);
        assert_eq!(size("512 MB").unwrap(), 512 << 20);
        for wrong in ["", "G", "-1G", "8X", "nan", "inf"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert_eq!(expert_memory("30%").unwrap(), ExpertMemory::Percent(30.0));
        assert_eq!(expert_memory("4M").unwrap(), ExpertMemory::Bytes(4 << 20));
        assert!(expert_memory("101%").is_err());
    }

    #[test]
    fn a_few_bytes_are_no_amount_of_memory() {
        let refusal = |s: &str| memory(s).unwrap_err().to_string();
        assert_eq!(refusal("6"), "6 bytes is too small; did you mean 6G?");
        assert_eq!(refusal(" 1.5"), "1.5 bytes is too small; did you mean 1.5G?");
        assert_eq!(refusal("65536"), "65536 bytes is too small; did you mean 65536K?");
        assert_eq!(expert_memory("6").unwrap_err().to_string(), refusal("6"));
        for (sound, bytes) in [("6K", 6 << 10), ("1048576", 1 << 20), ("8589934592", 8 << 30)] {
            assert_eq!(memory(sound).unwrap(), bytes);
        }
    }

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
