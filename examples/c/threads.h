/* threads.h - decode a frame by four threads, with codec_engine.h. */
#include <pthread.h>
#include <stdlib.h>

#include <codec/codec_engine.h>

struct task {
	const void *frame, *job;
	size_t nbytes, work_nbytes;
	codec_tensor *x;
	codec_range range;
	codec_status status;
	pthread_t thread;
};

static void *decode_range(void *p)
{
	struct task *t = p;
	void *work = malloc(t->work_nbytes);

	if (!work)
		abort();
	t->status = codec_decode_blocks(t->frame, t->nbytes, t->x, NULL, t->job, &t->range, work, t->work_nbytes);
	free(work);
	return NULL;
}

/* Decode a frame with header *info by four threads. After an error the contents of x are undefined. */
codec_status decode_by_four(const void *frame, const codec_info *info, codec_tensor *x)
{
	struct task tasks[4];
	size_t job_nbytes, work_nbytes;
	uint64_t checksum = 0;
	codec_status status;
	codec_plan plan;
	void *job;

	if ((status = codec_job_nbytes(&info->spec, x, &job_nbytes, &work_nbytes)))
		return status;
	if (!(job = malloc(job_nbytes)))
		abort();
	if ((status = codec_decode_open(frame, (size_t)info->frame_nbytes, x, NULL, job, job_nbytes, &plan))) {
		free(job);
		return status;
	}
	for (uint64_t i = 0; i < 4; i++) {
		uint64_t first = plan.nblocks * i / 4;

		tasks[i] = (struct task){.frame = frame, .nbytes = (size_t)info->frame_nbytes, .x = x, .job = job};
		tasks[i].work_nbytes = work_nbytes;
		tasks[i].range.first = first;
		tasks[i].range.count = plan.nblocks * (i + 1) / 4 - first;
		if (pthread_create(&tasks[i].thread, NULL, decode_range, &tasks[i]))
			abort();
	}
	for (int i = 0; i < 4; i++)
		pthread_join(tasks[i].thread, NULL);
	for (int i = 0; i < 4 && status == CODEC_OK; i++) { /* report the lowest block's error, as codec_decode does */
		status = tasks[i].status;
		checksum += tasks[i].range.checksum;
	}
	if (status == CODEC_OK)
		status = codec_decode_close(NULL, job, checksum);
	free(job);
	return status;
}
