"""What each key of each system means here, in a phrase; the systems' keys are those listed.

OWN, VERL, … are the tables of what can be read, by key. UNREAD has systems whose blocks are only
named: `of_unread` says whose a block is, and what its keys are called here. Tensors do not occur.
"""

from collections.abc import Mapping, Set
from dataclasses import fields

from three_policies.presets import RolloutCorrectionConfig

WEIGHTS, CAP = "the level of ρ that the weights have", "C: weights are min(ρ, C)"
NORMALIZE, BYPASS = "weights are divided by their mean", "π_old is π_rollout: two policies"

OWN = {"preset": "the preset from which the other keys start",
       **dict.fromkeys((f.name for f in fields(RolloutCorrectionConfig)), "this project's own")}
VERL_TIS = {
    "use_tis": "false switches the weights off", "tis_imp_ratio_cap": f"rollout_is: token; {CAP}",
    **dict.fromkeys(("imp_ratio_cap", "behav_imp_weight_cap"), f"rollout_is: token; {CAP}")}
VERL_060 = {
    "rollout_is": "true applies the weights, false measures them (metrics_only)",
    "rollout_is_level": WEIGHTS, "rollout_is_mode": "truncate caps; mask also rejects outside",
    "rollout_is_threshold": CAP, "rollout_is_threshold_lower": "the lower end of mask's interval",
    "rollout_is_veto_threshold": "seq_max_k1: [it, null], one token rejects its sequence",
    "rollout_is_batch_normalize": NORMALIZE}
VERL = {
    "rollout_is": WEIGHTS, "rollout_is_threshold": f'{CAP}; "lo_hi" sets those outside to 0',
    "rollout_is_batch_normalize": NORMALIZE,
    "rollout_rs": "criteria by name; token, sequence, geometric: k1 of that level",
    "rollout_rs_threshold": "their bounds; verl 0.9's of k1 are on 1/ρ and turned round here",
    "rollout_rs_threshold_lower": "the lower end of ρ; null: 1/upper",
    "rollout_token_veto_threshold": "seq_max_k1: [it, null], one token rejects its sequence",
    "bypass_mode": BYPASS, "bypass_old_logprob_for_rollout": BYPASS,
    "loss_type": "the loss: ppo_clip, or reinforce in bypass mode",
    "use_policy_gradient": "loss_type: reinforce", "use_pure_rollout_correction":
        "loss_type: reinforce", "loss_mode": "the loss, where it is gspo, sapo or cispo"}
MASK_OF = "keeps while {} is within [low, high]"
SKYRL = {
    **{key: VERL_TIS[key] for key in ("use_tis", "tis_imp_ratio_cap")}, "tis_ratio_type": WEIGHTS,
    "token_tis_ratio_clip_high": f"{CAP}, of tokens",
    "sequence_tis_ratio_clip_high": f"{CAP}, of sequences",
    "sequence_mask_metric": "product: seq_sum_k1; geometric: seq_mean_k1",
    **{f"{key}_{end}": f"{name}, which {MASK_OF.format(what)}" for key, name, what in (
        ("product_mask", "seq_sum_k1", "the product of ρ"),
        ("geo_mask", "seq_mean_k1", "the geometric mean of ρ"),
        ("outlier_token_is_threshold", "seq_max_k1", "every ρ of the sequence"),
        ("token_mask_is_threshold", "token_k1", "a token's ρ")) for end in ("low", "high")},
    "policy_loss_type": "the loss; rollout_is is reinforce in bypass mode",
    "cispo_anchor": "rollout: bypass_mode", "eps_clip_low": "1 − it is the lower end of rollout_is",
    "eps_clip_high": "1 + it is the upper end of rollout_is"}
TRL = {
    "use_vllm": "the block is TRL's; false: nothing samples but π_θ itself",
    "vllm_importance_sampling_correction": "false switches the weights off",
    "vllm_importance_sampling_mode": "level of ρ; truncate: min(ρ, C); mask: 0 outside",
    "vllm_importance_sampling_clip_max": "C, or the upper end",
    "vllm_importance_sampling_cap": "the older name of …_clip_max",
    "vllm_importance_sampling_clip_min": "the lower end of a mask",
    "off_policy_mask_threshold": "opsm of π_θ, not π_old; null alone can be read",
    "loss_type": "the loss, where it is cispo or sapo; else PPO's clip"}
PRIME = {
    "type": "ipo: token_tv; icepop: a pair on ρ; default: token_tv_outward; all with reinforce",
    "eps": "token_tv: a bound on |π − μ|", "ipo_threshold": "token_tv, in a release without a cap",
    "max_importance_ratio": CAP, "dppo_mask_low": "token_tv_outward; equal to dppo_mask_high",
    "dppo_mask_high": "token_tv_outward, which bounds sign(A)(π − μ)",
    "ratio_low": "the lower end of ρ: weights outside are 0", "ratio_high": "the upper end",
    "score_centering": "the mean score is subtracted", "adv_tau": "no correction: must be 1",
    "kl_tau": "no correction: must be 0"}
OPENRLHF = {
    "is_correction_level": "token or seq: what is judged; off: nothing",
    "is_correction_mode": "mask: ρ is kept inside the bounds, else 0; clip: min(ρ, C)",
    "is_correction_gating": "ratio: ρ or its geometric mean; tv: token_tv, seq_mean_tv; "
                            "binary_kl: token_binary_kl, seq_mean_binary_kl",
    "is_correction_threshold": "[low, high] on ρ itself; one number is the upper bound",
    "is_correction_enable": "before 0.11: false is off",
    "is_correction_type": "before 0.11: tis is clip, icepop and seq-mask-tis are mask",
    "policy_loss_type": "ppo or gspo; gspo with a correction clips around π_rollout (bypass_mode)"}
SLIME = {
    "use_tis": "rollout_is: token", "tis_clip": CAP,
    "tis_clip_low": "the lower end of icepop_function; else 0, since nothing here raises ρ",
    "custom_tis_function_path": "icepop_function: weights outside [tis_clip_low, tis_clip] are 0",
    "use_rollout_logprobs": BYPASS, "use_opsm": "with use_rollout_logprobs: opsm",
    "opsm_delta": "δ of opsm", "advantage_estimator": "the loss, where it is gspo or cispo"}
NEMO_RL = {
    "use_importance_sampling_correction": "rollout_is: token; false: no weights",
    "truncated_importance_sampling_ratio": "C, or the upper end; null: C = ∞",
    "truncated_importance_sampling_ratio_min": "the lower end of icepop and seq-mask-tis",
    "truncated_importance_sampling_type": "tis: min(ρ, C); icepop: 0 outside; seq-mask-tis: "
                                          "seq_mean_k1 beside an uncapped ρ",
    "sequence_level_importance_ratios": "rollout_is: sequence, and loss_type: gspo",
    "use_cispo": "loss_type: cispo", "disable_ppo_ratio": "must be false: its weights are of π_old",
    "force_on_policy_ratio": "r = 1, which is so in the one update a rollout that it asks for"}
NEMO_RL_BESIDE = {              # of the same block, and no correction
    "token_level_loss", "ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "use_kl_in_reward",
    "reference_policy_kl_penalty", "reference_policy_kl_type", "kl_input_clamp_value",
    "kl_output_clamp_value", "use_on_policy_kl_approximation"}

READ = {"this project": OWN, "verl 0.9": VERL, "verl 0.6.0": VERL_060, "verl (TIS)": VERL_TIS,
        "SkyRL": SKYRL, "TRL": TRL, "prime-rl": PRIME, "OpenRLHF": OPENRLHF, "slime": SLIME,
        "NeMo-RL": NEMO_RL}

# Of systems that are named and not read: their own keys, and what they are here.
UNREAD = {
    "AReaL": {
        "behave_imp_weight_cap": f"rollout_is_threshold, {CAP}",
        "behave_imp_weight_mode": "token_truncate: rollout_is: token and a number; token_mask: a "
                                  "pair; sequence_*: rollout_is: geometric",
        "rejection_sampling": "metric ratio: clamp is rollout_is_threshold, mask is token_k1 or, "
                              " of sequences, seq_mean_k1 (agg mean), seq_sum_k1, seq_max_k1; "
                              "kl_k2, kl_k3: the criteria of k2 and k3; binary_kl: token_binary_kl",
        "use_decoupled_loss": "bypass_mode: false",
        "m2_threshold": "rollout_rs: {second_moment: it}",
        "recompute_logprob": "false is bypass_mode: true"},
    "ms-swift": {
        "rollout_importance_sampling_mode": "rollout_is: token or sequence; rollout_is_threshold: "
                                            "a number for _truncate, a pair [null, C] for _mask",
        "rollout_importance_sampling_threshold": f"rollout_is_threshold, {CAP}",
        "importance_sampling_level": "sequence is loss_type: gspo",
        "off_policy_sequence_mask_delta": "rollout_rs: {opsm: it}, of π_θ instead of π_old",
        "log_rollout_offpolicy_metrics": "always on"},
    "open-instruct": {
        "truncated_importance_sampling_ratio_cap": f"rollout_is: token, {CAP}; 0 is off",
        "use_vllm_logprobs": "bypass_mode: true",
        "rho_clamp_upper_bound": f"rollout_is: token, {CAP}",
        "rho_mask_lower_bound": "the lower end of token_k1", "rho_mask_upper_bound":
            "the upper end of token_k1; beside rho_mask_tv_divergence rollout_rs: {vaco: it}",
        "rho_mask_sequence_level": "true judges seq_mean_k1",
        "rho_mask_tv_divergence": "rollout_rs: {vaco: rho_mask_upper_bound}",
        "tis_mask_lower": "the lower end of token_k1", "tis_mask_upper": "its upper end",
        "dppo_divergence_type": "tv with dppo_divergence_threshold δ: rollout_rs: "
                                "{token_tv_outward: δ}; kl has no equal here",
        "dppo_divergence_threshold": "δ of token_tv_outward"},
    "xtuner": {
        "rollout_is_mask_threshold": "rollout_rs: {token_k1, seq_sum_k1 or seq_mean_k1: [lo, hi]}; "
                                     "xtuner writes its pairs as (upper, lower)"},
    "rllm": {
        "tis_mode": "rollout_is: token or sequence", "tis_cap": f"rollout_is_threshold, {CAP}"},
    "slime's train_infer_mismatch_helper": {
        "tis_level": WEIGHTS, "tis_upper_bound": CAP, "tis_lower_bound": "the lower end of mask",
        "use_rs": "a criterion: token_k1, seq_sum_k1 or seq_mean_k1, by rs_level",
        "rs_level": "which criterion", "rs_lower_bound": "its lower end",
        "rs_upper_bound": "its upper end", "rs_veto_threshold": "seq_max_k1: [it, null]",
        "tis_batch_normalize": NORMALIZE}}


def of_unread(keys: Set[str]) -> str | None:
    """Return whose block this is, if it is of UNREAD, and what its keys are here; or None."""
    found = {system: own for system, table in UNREAD.items()
             if (own := [key for key in table if key in keys])}
    if not found:
        return None
    system = max(found, key=lambda name: len(found[name]))
    phrases = "; ".join(f"{key}: {UNREAD[system][key]}" for key in found[system])
    return f"this is a block of {system}, which is not read. Here {phrases}"


def sentences(block: Mapping[str, object], table: Mapping[str, str]) -> list[str]:
    """Return "key: what it means here" for each key of a block that is another system's."""
    return [f"{key}: {table[key]}" for key in block if key in table and table is not OWN]
