//! The memory plan: what will be resident and what it costs, known before anything is loaded.

use crate::backend::{KvShape, Precision};
use crate::error::{Bytes, Error, Result};
use crate::models::Blueprint;

/// Bytes by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Dense weights: attention, norms, routers, embeddings.
    pub dense: u64,
    /// Routed experts.
    pub experts: u64,
    /// Keys and values of one conversation that fills its context.
    pub kv: u64,
    /// Buffers of the forward pass.
    pub scratch: u64,
}

impl Plan {
    /// The plan for a model with one conversation of `context` tokens.
    pub fn new(blueprint: &Blueprint, context: usize, precision: Precision) -> Plan {
        Plan {
            dense: blueprint.dense_bytes(),
            experts: blueprint.expert_bytes(),
            kv: position_bytes(blueprint, precision).saturating_mul(context as u64),
            scratch: blueprint.scratch_bytes(),
        }
    }

    /// All of it. A sum beyond any memory stays at the largest number.
    pub fn total(&self) -> u64 {
        [self.experts, self.kv, self.scratch].into_iter().fold(self.dense, u64::saturating_add)
    }

    /// Refuses a plan that the memory at hand cannot hold.
    ///
    /// # Errors
    /// [`Error::Budget`] with what is needed and what there is.
    pub fn check(&self, available: u64) -> Result<()> {
        if self.total() <= available {
            return Ok(());
        }
        let what = format!(
            "dense weights {}, experts {}, context {}, scratch {}",
            Bytes(self.dense),
            Bytes(self.experts),
            Bytes(self.kv),
            Bytes(self.scratch)
        );
        let remedy = if self.total() - self.kv <= available {
            "ask for a shorter context".into()
        } else {
            "use a smaller model or a machine with more memory".into()
        };
        Err(Error::Budget { need: self.total(), have: available, what, remedy })
    }
}

/// What one token reads when it is computed alone, as in decoding: a bound on its speed is the memory's bandwidth
/// divided by this. Activations are not counted, for they stay in the processor's caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Dense weights: all but the rows of the embedding table that are other tokens'. The output matrix is
    /// read once, also where it is the embedding table.
    pub dense: u64,
    /// The experts that the router chooses, in all layers.
    pub experts: u64,
    /// Keys and values of one position, in their stored type.
    pub position: u64,
}

impl Traffic {
    /// The traffic of a model.
    pub fn new(blueprint: &Blueprint, precision: Precision) -> Traffic {
        Traffic {
            dense: blueprint.dense_bytes_per_token(),
            experts: blueprint.expert_bytes_per_token(),
            position: position_bytes(blueprint, precision),
        }
    }

    /// Bytes that a token reads when it attends to `positions` positions, its own among them.
    pub fn bytes(&self, positions: u64) -> u64 {
        self.dense + self.experts + self.position * positions
    }
}

/// Bytes of the keys and values of one position in all layers.
fn position_bytes(blueprint: &Blueprint, precision: Precision) -> u64 {
    let cell = match precision {
        Precision::Fast => 2,
        Precision::Exact => 4,
    };
    let cells = |kv: &KvShape| kv.heads as u64 * (kv.key_dim + kv.value_dim) as u64;
    let state = blueprint.model.state();
    state.iter().map(|kv| cells(kv).saturating_mul(cell)).fold(0, u64::saturating_add)
}

/// Memory that can be had without swapping, where the operating system tells.
pub fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_that_does_not_fit_says_what_to_change() {
        let plan = Plan { dense: 4 << 30, experts: 1 << 30, kv: 2 << 30, scratch: 0 };
        assert!(plan.check(7 << 30).is_ok());
        let message = plan.check(6 << 30).unwrap_err().to_string();
        assert!(message.starts_with("needs 7.0 GiB of memory"), "{message}");
        assert!(message.ends_with("but 6.0 GiB is available; ask for a shorter context"), "{message}");
        let message = plan.check(4 << 30).unwrap_err().to_string();
        assert!(message.ends_with("use a smaller model or a machine with more memory"), "{message}");
    }
}
