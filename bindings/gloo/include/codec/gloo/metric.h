/* metric.h - metrics of Truncate: validate metrics, and select the part of a metric that applies to a piece. */
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <codec/codec.h>

#include "errors.h"
#include "parameters.h"
#include "slices.h"

namespace codec::gloo::detail
{

/*
 * Throw ArgumentError unless the ranges of metrics ascend and their arrays have n values each, as MetricOf requires.
 */
inline void check_metrics(const codec_metric *metric, uint64_t n)
{
	uint64_t from = 0;

	for (const codec_metric *m = metric; m; from = m->until, m = m->until ? m->next : nullptr) {
		bool good = m->struct_nbytes >= sizeof *m && (!m->until || (m->until > from && m->next));

		if (good && !m->user)
			for (const codec_tensor *t : {m->theta, m->v, m->m})
				good = good && (!t || (t->struct_nbytes >= sizeof *t && (t->data || !n) &&
						       t->nbytes == n * codec_dtype_nbytes(t->dtype)));
		if (!good)
			throw ArgumentError(
				CODEC_BAD_ARGUMENT,
				"a metric is invalid, or one of its arrays does not have as many values as the tensor");
	}
}

/*
 * Part of a list of metrics that applies to a piece of a tensor: the parameter groups that overlap the piece, with
 * views of their arrays.
 */
class MetricOf
{
public:
	MetricOf(const codec_metric *metric, const Piece &piece)
	{
		for (const codec_metric *m = metric; m; m = m->next) {
			bool last = !m->until || m->until >= piece.end;

			if (!last && m->until <= piece.begin)
				continue;
			each_.push_back(std::make_unique<Each>(*m, piece, last));
			if (each_.size() > 1)
				each_[each_.size() - 2]->metric.next = &each_.back()->metric;
			if (last)
				break;
		}
	}

	const codec_metric *get() const
	{
		return each_.empty() ? nullptr : &each_.front()->metric;
	}

private:
	struct Each {
		Each(const codec_metric &whole, const Piece &piece, bool last)
		    : metric(whole), user(whole), begin(piece.begin)
		{
			metric.next = nullptr;
			metric.until = last ? 0 : whole.until - begin;
			metric.theta = part(whole.theta, theta, piece);
			metric.v = part(whole.v, v, piece);
			metric.m = part(whole.m, m, piece);
			if (whole.user) {
				metric.user = later;
				metric.data = this;
			}
		}

		static const codec_tensor *part(const codec_tensor *whole, codec_tensor &of, const Piece &piece)
		{
			if (!whole)
				return nullptr;
			of = tensor_of(whole->dtype,
				       static_cast<const uint8_t *>(whole->data) +
					       piece.begin * codec_dtype_nbytes(whole->dtype),
				       piece.n());
			return &of;
		}

		static void later(void *data, uint64_t first, uint64_t n, float *a)
		{
			const auto *each = static_cast<const Each *>(data);

			each->user.user(each->user.data, each->begin + first, n, a);
		}

		codec_metric metric, user;
		codec_tensor theta, v, m;
		uint64_t begin;
	};
	std::vector<std::unique_ptr<Each>> each_;
};

} // namespace codec::gloo::detail
