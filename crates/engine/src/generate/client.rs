//! Who asks: what requests may share, and among whom places are divided.

/// Those whose prompts may share what was computed of them. Nobody of another tenant can find out, by counts of tokens or by
/// time, what was asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tenant(pub u128);

/// Who asks. Requests that do not say are one client's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Client {
    /// Whom it shares with.
    pub tenant: Tenant,
    /// Tells clients apart: places are divided among them, however many requests each of them has.
    pub number: u128,
}
