"""The attention side of the model: one lane of a step from token ids to logits.

Everything but the routed experts runs here; at each MoE layer the lane dispatches latents, computes
the shared experts and is suspended until its driver resumes it. Requests are independent: a lane
writes only the slots and blocks of its own segments, so one that is closed early spoils no other.

Under invariant numerics a request's logits do not depend on what else is in the lane. On the CPU
this holds for any fixed number of threads; across machines it does not.

Shapes: T rows of the lane (padded under invariant numerics), D hidden size, R wanted logit rows.
"""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor
from torch.nn import functional

from configs.numerics import Numerics
from model.attnres import mix_rows
from model.batch import StepBatch
from model.cache import ModelMemory
from model.dims import ModelDims
from model.dispatcher import Dispatcher, Ticket
from model.kda_layer import KdaLayer
from model.latent_moe import GluLayer, LatentMoeLayer, MoeInputs
from model.linear import linear, pad_rows
from model.mla_layer import MlaLayer
from model.norm import rms_norm
from model.step_plan import StepPlan, plan_step
from model.weight_tree import AttentionSideWeights, GluWeights, KdaWeights, LayerWeights, MlaWeights


class Decoder:
    """The decoder of one attention worker. Holds weights; all per-request state is in the memory.

    Several lanes may be suspended at the same time when they share no request.
    """

    def __init__(
        self, dims: ModelDims, weights: AttentionSideWeights, *, numerics: Numerics
    ) -> None:
        self._dims = dims
        self._weights = weights
        self._numerics = numerics
        self._attentions = [self._make_attention(layer.attention) for layer in weights.layers]
        self._mlps = [self._make_mlp(layer) for layer in weights.layers]
        self._pool_rows = {
            layer: row
            for rows in (dims.kda_layers, dims.mla_layers)
            for row, layer in enumerate(rows)
        }

    def run(
        self, batch: StepBatch, memory: ModelMemory, dispatcher: Dispatcher
    ) -> Generator[Ticket, None, Tensor]:
        """Compute one lane of a step.

        Yields the ticket of each MoE layer when the dispatch has begun and the shared experts are
        done; when resumed it calls `dispatcher.finish(ticket)`.

        Args:
            batch: The lane's tokens.
            memory: Read and written in place, slots and blocks of the batch's segments only.
            dispatcher: Computes the routed experts of the lane's tokens, never of padding.

        Returns:
            float32 logits `[R, vocab]` of `batch.logit_rows_R`.

        Raises:
            InvariantError: The batch is malformed (`plan_step`).
        """
        plan = plan_step(batch, block_size=memory.block_size, numerics=self._numerics)
        token_ids = functional.pad(batch.token_ids_T, (0, plan.num_rows - plan.num_tokens))
        prefix_TD = functional.embedding(token_ids, self._weights.embedding)
        bank: list[Tensor] = []
        for index, layer in enumerate(self._weights.layers):
            mixed_TD = self._mix([*bank, prefix_TD], layer.attention_mix) if bank else prefix_TD
            is_new_block = index % self._dims.attn_res_block_size == 0
            if is_new_block:
                bank.append(prefix_TD)
            attended_TD = self._attend(
                index, self._normalize(mixed_TD, layer.input_norm), plan, memory
            )
            prefix_TD = attended_TD if is_new_block else prefix_TD + attended_TD
            mixed_TD = self._mix([*bank, prefix_TD], layer.mlp_mix)
            h_TD = self._normalize(mixed_TD, layer.post_attention_norm)
            mlp = self._mlps[index]
            if isinstance(mlp, GluLayer):
                prefix_TD = prefix_TD + mlp.forward(h_TD)
                continue
            inputs = mlp.prepare(h_TD)
            ticket = self._dispatch(index, inputs, plan.num_tokens, dispatcher)
            shared_TD = mlp.compute_shared(inputs)
            yield ticket
            u_TL = self._pad(dispatcher.finish(ticket))
            prefix_TD = prefix_TD + mlp.merge(u_TL, shared_TD, dtype=h_TD.dtype)
        return self._compute_logits([*bank, prefix_TD], batch.logit_rows_R)

    def _make_attention(self, weights: KdaWeights | MlaWeights) -> KdaLayer | MlaLayer:
        """The attention layer for these weights."""
        dims, numerics = self._dims, self._numerics
        if isinstance(weights, KdaWeights):
            return KdaLayer(weights, dims.kda, norm_eps=dims.rms_norm_eps, numerics=numerics)
        return MlaLayer(weights, dims.mla, numerics=numerics)

    def _make_mlp(self, weights: LayerWeights) -> GluLayer | LatentMoeLayer:
        """The MLP for these weights."""
        if isinstance(weights.mlp, GluWeights):
            return GluLayer(weights.mlp, self._dims, numerics=self._numerics)
        return LatentMoeLayer(weights.mlp, self._dims, numerics=self._numerics)

    def _attend(self, index: int, x_TD: Tensor, plan: StepPlan, memory: ModelMemory) -> Tensor:
        """The attention of a layer, on its rows of the memory."""
        attention = self._attentions[index]
        row = self._pool_rows[index]
        if isinstance(attention, MlaLayer):
            return attention.forward(x_TD, plan, memory.kv_MNPC[row])
        return attention.forward(x_TD, plan, memory.state_ASHDD[row], memory.conv_ASJ3HD[row])

    @staticmethod
    def _dispatch(index: int, inputs: MoeInputs, num_tokens: int, dispatcher: Dispatcher) -> Ticket:
        """Send the lane's tokens, not its padding, to the routed experts."""
        return dispatcher.begin(
            index,
            inputs.latents_TL[:num_tokens],
            inputs.expert_ids_TK[:num_tokens].contiguous(),
            inputs.weights_TK[:num_tokens].contiguous(),
        )

    def _mix(self, rows: list[Tensor], vector_D: Tensor) -> Tensor:
        """An AttnRes mix."""
        return mix_rows(rows, vector_D, eps=self._dims.rms_norm_eps, numerics=self._numerics)

    def _normalize(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        """A layer norm."""
        return rms_norm(x_TD, weight_D, eps=self._dims.rms_norm_eps)

    def _pad(self, x: Tensor) -> Tensor:
        """Zero rows up to the row tile, under invariant numerics."""
        return pad_rows(x) if self._numerics is Numerics.INVARIANT else x

    def _compute_logits(self, rows: list[Tensor], logit_rows_R: Tensor) -> Tensor:
        """Mix, norm and head of the wanted rows only."""
        wanted = [self._pad(row_TD.index_select(0, logit_rows_R)) for row_TD in rows]
        final_RD = self._normalize(
            self._mix(wanted, self._weights.output_mix), self._weights.final_norm
        )
        logits_RV = linear(final_RD, self._weights.lm_head, numerics=self._numerics)
        return logits_RV[: logit_rows_R.shape[0]].float()


def drive(lane: Generator[Ticket, None, Tensor]) -> Tensor:
    """Run one lane to its end, waiting at each ticket, and return its logits."""
    while True:
        try:
            next(lane)
        except StopIteration as end:
            logits: Tensor = end.value
            return logits
