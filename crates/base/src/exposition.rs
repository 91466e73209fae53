//! Metrics as text for Prometheus, in its format 0.0.4.

use std::fmt::{Arguments, Display, Write as _};

/// Writes one metric after the other: first what it is, then its samples.
///
/// ```
/// use tenfold_base::Exposition;
/// let mut page = Exposition::default();
/// page.gauge("jobs", "Jobs that run.");
/// page.labelled(&[("user", &"a\"b")], 3);
/// assert_eq!(page.into_text(), "# HELP jobs Jobs that run.\n# TYPE jobs gauge\njobs{user=\"a\\\"b\"} 3\n");
/// ```
#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
    name: &'static str,
}

impl Exposition {
    /// The media type of the text.
    pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

    /// Begins a metric that only grows.
    pub fn counter(&mut self, name: &'static str, help: &str) {
        self.begin(name, help, "counter");
    }

    /// Begins a metric that goes up and down.
    pub fn gauge(&mut self, name: &'static str, help: &str) {
        self.begin(name, help, "gauge");
    }

    /// Begins a metric that counts by buckets; see [`Exposition::distribution`].
    pub fn histogram(&mut self, name: &'static str, help: &str) {
        self.begin(name, help, "histogram");
    }

    /// Begins a metric with a sum and a count; see [`Exposition::part`].
    pub fn summary(&mut self, name: &'static str, help: &str) {
        self.begin(name, help, "summary");
    }

    fn begin(&mut self, name: &'static str, help: &str, kind: &str) {
        self.name = name;
        self.write(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    /// The only sample of a metric.
    pub fn number(&mut self, number: impl Display) {
        let name = self.name;
        self.write(format_args!("{name} {number}\n"));
    }

    /// A sample with its labels, whose values may be any text.
    pub fn labelled(&mut self, labels: &[(&str, &dyn Display)], number: impl Display) {
        self.part("", labels, number);
    }

    /// A sample of a part of the metric, such as `_sum`.
    pub fn part(&mut self, suffix: &str, labels: &[(&str, &dyn Display)], number: impl Display) {
        let name = self.name;
        self.write(format_args!("{name}{suffix}{{"));
        for (index, (label, value)) in labels.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            let value = escape(&value.to_string());
            self.write(format_args!("{comma}{label}=\"{value}\""));
        }
        self.write(format_args!("}} {number}\n"));
    }

    /// The samples of a histogram: how many values each bucket has, up to which bound, and the sum of all values. The last bucket
    /// has no bound.
    pub fn distribution(
        &mut self,
        labels: &[(&str, &dyn Display)],
        buckets: impl Iterator<Item = (Option<f64>, u64)>,
        sum: f64,
    ) {
        let mut total = 0;
        for (bound, count) in buckets {
            total += count;
            let bound: &dyn Display = match &bound {
                Some(bound) => bound,
                None => &"+Inf",
            };
            let labels: Vec<(&str, &dyn Display)> = labels.iter().copied().chain([("le", bound)]).collect();
            self.part("_bucket", &labels, total);
        }
        self.part("_sum", labels, sum);
        self.part("_count", labels, total);
    }

    /// The page.
    pub fn into_text(self) -> String {
        self.text
    }

    fn write(&mut self, text: Arguments<'_>) {
        self.text.write_fmt(text).expect("a string takes everything");
    }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buckets_of_a_histogram_add_up() {
        let mut page = Exposition::default();
        page.histogram("wait", "Waits.");
        page.distribution(&[("op", &"send")], [(Some(0.5), 2), (None, 1)].into_iter(), 1.25);
        let expected = "# HELP wait Waits.\n# TYPE wait histogram\nwait_bucket{op=\"send\",le=\"0.5\"} 2\n\
                        wait_bucket{op=\"send\",le=\"+Inf\"} 3\nwait_sum{op=\"send\"} 1.25\n\
                        wait_count{op=\"send\"} 3\n";
        assert_eq!(page.into_text(), expected);
    }

    #[test]
    fn the_value_of_a_label_may_be_any_text() {
        let mut page = Exposition::default();
        page.counter("jobs", "Jobs.");
        page.labelled(&[("name", &"a\"b\\c\nd{}"), ("rank", &3)], 1);
        assert!(page.into_text().ends_with("jobs{name=\"a\\\"b\\\\c\\nd{}\",rank=\"3\"} 1\n"));
    }
}
