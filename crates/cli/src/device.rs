//! The device that computes: the CPU or a GPU.

use std::ffi::OsStr;
use std::io::IsTerminal;
use std::str::FromStr;

use anyhow::{Result, anyhow};
use clap::Args;
use clap::builder::{PossibleValue, TypedValueParser};
use forebay_cuda::Cuda;
use forebay_engine::Error;

use crate::errors::in_flags;
use crate::values::memory;

/// The device that computes, and how much of its memory it may use.
#[derive(Clone, Args)]
#[command(next_help_heading = "GPU")]
pub struct DeviceArgs {
    /// Where to compute
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = DeviceParser)]
    device: Choice,
    /// GPU memory budget, such as 20G [default: free GPU memory, less a margin]
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    vram: Option<u64>,
    /// Let the CPU compute experts that are in memory but not on the GPU, where that is faster than uploading them (up to four
    /// conversations at a time); changes the last bits of results
    #[arg(long)]
    pub cpu_experts: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Auto,
    Cpu,
    Cuda(usize),
}

impl FromStr for Choice {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> Result<Choice> {
        match s.split_once(':') {
            None if s == "auto" => Ok(Choice::Auto),
            None if s == "cpu" => Ok(Choice::Cpu),
            None if s == "cuda" => Ok(Choice::Cuda(0)),
            Some(("cuda", number)) => {
                Ok(Choice::Cuda(number.parse().map_err(|_| anyhow!("expected cuda:0"))?))
            }
            _ => Err(anyhow!("expected auto, cpu or cuda:0")),
        }
    }
}

/// Reads a [`Choice`], and knows the usual ones for help and completions.
#[derive(Clone)]
struct DeviceParser;

impl TypedValueParser for DeviceParser {
    type Value = Choice;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<Choice, clap::Error> {
        Choice::from_str.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let values = [
            (
                "auto",
                "The first GPU if the dense weights, the context and one layer's experts fit there, otherwise the CPU",
            ),
            ("cpu", "The CPU"),
            ("cuda:0", "The first NVIDIA GPU, or an error; cuda:1 is the second, and so on"),
        ];
        Some(Box::new(values.into_iter().map(|(name, help)| PossibleValue::new(name).help(help))))
    }
}

impl DeviceArgs {
    /// The GPU to compute on; `None` for the CPU.
    pub fn open(&self) -> Result<Option<Cuda>> {
        match self.device {
            Choice::Cpu => Ok(None),
            Choice::Cuda(number) => Ok(Some(Cuda::open(number, self.vram)?)),
            // A missing GPU is not worth a message; one that cannot be used is.
            Choice::Auto => match forebay_cuda::find() {
                Err(why) => {
                    tracing::info!("running on the CPU: {why}");
                    Ok(None)
                }
                Ok(_) => match Cuda::open(0, self.vram) {
                    Ok(gpu) => Ok(Some(gpu)),
                    Err(error) => {
                        eprintln!("Running on the CPU: {}", in_flags(&error.to_string()));
                        Ok(None)
                    }
                },
            },
        }
    }

    /// Whether the CPU may compute instead, after a GPU has failed with this error.
    pub fn may_fall_back(&self, error: &Error) -> bool {
        self.device == Choice::Auto
            && matches!(
                error,
                Error::Budget { .. } | Error::Unsupported(_) | Error::Backend(_) | Error::DeviceLost(_)
            )
    }
}

/// Shows a note: on stderr if that is a terminal, else in the log.
pub fn note(text: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("{text}");
    } else {
        tracing::info!("{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_numbers() {
        assert_eq!("auto".parse::<Choice>().unwrap(), Choice::Auto);
        assert_eq!("cpu".parse::<Choice>().unwrap(), Choice::Cpu);
        assert_eq!("cuda:3".parse::<Choice>().unwrap(), Choice::Cuda(3));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cpu:1"] {
            assert!(wrong.parse::<Choice>().is_err(), "{wrong}");
        }
    }
}
