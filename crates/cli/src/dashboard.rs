//! What the dashboard shows.

#[allow(dead_code, reason = "the API calls the rest of it")]
pub(crate) mod verdict;
