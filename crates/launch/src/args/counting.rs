//! The number of ranks that `--nproc-per-node` asks for: processors and NVIDIA devices.

/// Ranks of one node; a limit against typing errors.
pub(super) const RANKS_MAX: usize = 1024;

pub(super) fn count_ranks(text: &str) -> Result<usize, String> {
    let ranks = match text {
        "cpu" => processors(),
        "auto" => match devices() {
            0 => processors(),
            devices => devices,
        },
        "gpu" => match devices() {
            0 => {
                return Err("--nproc-per-node gpu: no usable NVIDIA device found\n  hint: \
                            /proc/driver/nvidia/gpus and /dev/nvidia0 do not exist, or CUDA_VISIBLE_DEVICES lists none of \
                            them; give a number, or `cpu`"
                    .into());
            }
            devices => devices,
        },
        "xpu" => return Err("--nproc-per-node xpu: tenfold cannot count such devices\n  hint: give a number".into()),
        number => number.parse().map_err(|_| {
            format!("--nproc-per-node: invalid number of ranks `{number}`\n  hint: give a number, or one of auto, cpu, gpu")
        })?,
    };
    if (1..=RANKS_MAX).contains(&ranks) {
        Ok(ranks)
    } else {
        Err(format!(
            "--nproc-per-node: {ranks} ranks on one node are out of range: expected 1 to {RANKS_MAX}"
        ))
    }
}

/// Processors that this process may run on.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// NVIDIA devices that ranks can use.
fn devices() -> usize {
    let present = devices_present();
    std::env::var("CUDA_VISIBLE_DEVICES").map_or(present, |list| visible(&list, present))
}

/// How many devices CUDA_VISIBLE_DEVICES leaves, read as CUDA and PyTorch do: numbers, or names with the same
/// prefix. The first invalid entry ends the list, and a duplicate empties it.
fn visible(list: &str, present: usize) -> usize {
    let kind = ["GPU-", "MIG-"].into_iter().find(|kind| list.trim_start().starts_with(kind));
    let mut seen = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let device = match kind {
            Some(kind) => entry.starts_with(kind).then_some(entry),
            None => entry.parse().is_ok_and(|number: usize| number < present).then_some(entry),
        };
        let Some(device) = device else { break };
        if seen.contains(&device) {
            return 0;
        }
        seen.push(device);
    }
    if kind == Some("MIG-") && present > 0 { seen.len() } else { seen.len().min(present) } // one device has several MIG instances
}

/// NVIDIA devices of this machine, without asking NVIDIA's library.
fn devices_present() -> usize {
    let listed = std::fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, |devices| devices.flatten().count());
    if listed > 0 {
        return listed;
    }
    let is_device = |name: &std::ffi::OsStr| {
        let number = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit()))
    };
    let files = std::fs::read_dir("/dev")
        .map(|files| files.flatten().filter(|file| is_device(&file.file_name())).count());
    files.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_ranks_cannot_see_are_not_counted() {
        for (list, devices) in [
            ("0,1", 2),
            ("3", 1),
            (" 2 , 0 ", 2),
            ("", 0),
            ("-1", 0),
            ("0,-1,1", 1),
            ("0,4,1", 1), // of four the last is 3
            ("1,1", 0),
            ("none", 0),
            ("GPU-8932f937,GPU-1b7c2d11", 2),
            ("GPU-8932f937,1", 1),
            ("MIG-a,MIG-b,MIG-c,MIG-d,MIG-e", 5),
        ] {
            assert_eq!(visible(list, 4), devices, "{list}");
        }
        assert_eq!(visible("0,1", 0), 0);
    }
}
